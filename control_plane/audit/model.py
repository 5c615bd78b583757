"""Idempotency keys: whether a request runs, or gets its earlier answer again; pure."""

import hashlib
import re
from dataclasses import dataclass

from sluice.errors import BadRequestError, ErrorCode, PlatformError

KEPT_H = 24
_KEY = re.compile(r"[\x21-\x7e]{1,128}")
_SECRET = re.compile(r"sk-sluice[A-Za-z0-9_-]*")
_TEXT_MAX = 512


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The stored answer of a request with an idempotency key.

    Attributes:
        request_sha256: Hash of the request; a different request cannot use the key.
        status: HTTP status.
        body: JSON; empty when there is none, or when it may not be kept.
        is_secret: Whether the body held a secret, so that it was not stored.
        object_id: Id of the written object.
    """

    request_sha256: bytes
    status: int
    body: str
    is_secret: bool
    object_id: str


def checked_key(text: str) -> str:
    """Return a valid idempotency key; BadRequestError names the expected form."""
    if not _KEY.fullmatch(text):
        message = "Idempotency-Key: 1 to 128 visible ASCII characters are expected"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="Idempotency-Key")
    return text


def fingerprint(method: str, path: str, body: bytes, conditions: tuple[str, str]) -> bytes:
    """Return the SHA-256 of a request; equal for equal requests only.

    Args:
        method: HTTP method.
        path: Path with the query.
        body: Body as received.
        conditions: The headers If-Match and If-None-Match; empty when there are none.
    """
    parts = (method.encode(), path.encode(), body, *(text.encode() for text in conditions))
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).digest()


def lock_number(actor_id: str, key: str) -> int:
    """Return the number (signed, 64 bits) of the lock for requests with this key."""
    digest = hashlib.sha256(f"{actor_id}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def check_replay(kept: KeptAnswer, request_sha256: bytes) -> None:
    """Check that a request may get the answer that is stored under its key.

    Raises:
        PlatformError: The request differs (422), or the answer held a secret (409).
    """
    if kept.request_sha256 != request_sha256:
        message = (
            "this Idempotency-Key came with another request before (method, path, conditions or "
            f"body differ): keys are for one request each, and remembered for {KEPT_H} h"
        )
        raise PlatformError(ErrorCode.IDEMPOTENCY_KEY_REUSED, message, param="Idempotency-Key")
    if kept.is_secret:
        message = (
            f"the key was made ({kept.object_id}), and its text is shown only once; "
            "rotate it to see a new text"
        )
        raise PlatformError(ErrorCode.CONFLICT, message, param="Idempotency-Key")


def in_progress() -> PlatformError:
    """Return the error while the first request with a key still runs."""
    message = "the first request with this Idempotency-Key is still under way: ask again"
    return PlatformError(ErrorCode.CONFLICT, message, retry_after_s=1.0, param="Idempotency-Key")


def recordable(text: str) -> str:
    """Return a text fit for recording: short, storable, and without the text of a key.

    People paste keys where ids are expected.
    """
    storable = text.encode("utf-8", "replace").decode().replace("\0", "")
    return _SECRET.sub("sk-sluice-...", storable)[:_TEXT_MAX]
