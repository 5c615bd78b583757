"""Idempotency keys, by which a repeated request returns its earlier answer. Pure."""

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
        request_sha256: Hash of the request. A different request must not use the same key.
        status: HTTP status.
        body: JSON body, or empty if there is none or if it must not be stored.
        is_secret: Whether the body contained a secret, and so was not stored.
        object_id: Id of the written object.
    """

    request_sha256: bytes
    status: int
    body: str
    is_secret: bool
    object_id: str


def checked_key(text: str) -> str:
    """Return a valid idempotency key. Raises BadRequestError if it is not valid."""
    if not _KEY.fullmatch(text):
        message = "Idempotency-Key: 1 to 128 visible ASCII characters are expected"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="Idempotency-Key")
    return text


def fingerprint(method: str, path: str, body: bytes, conditions: tuple[str, str]) -> bytes:
    """Return the SHA-256 of a request. Different requests have different hashes.

    Args:
        method: HTTP method.
        path: Path with the query.
        body: Body as received.
        conditions: Values of the headers If-Match and If-None-Match, each empty without the header.
    """
    parts = (method.encode(), path.encode(), body, *(text.encode() for text in conditions))
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).digest()


def lock_number(actor_id: str, key: str) -> int:
    """Return the signed 64-bit number of the advisory lock for requests with this key."""
    digest = hashlib.sha256(f"{actor_id}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def check_replay(kept: KeptAnswer, request_sha256: bytes) -> None:
    """Check that the answer stored under an idempotency key belongs to a request.

    Raises:
        PlatformError: The request differs (422), or the answer contained a secret (409).
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
    """Return the error for a request while the first request with its key still runs."""
    message = "the first request with this Idempotency-Key is still under way: ask again"
    return PlatformError(ErrorCode.CONFLICT, message, retry_after_s=1.0, param="Idempotency-Key")


def recordable(text: str) -> str:
    """Return a text in the form that is recorded, shortened and without the text of any key.

    The text of a key is removed because people sometimes paste keys in place of ids.
    """
    storable = text.encode("utf-8", "replace").decode().replace("\0", "")
    return _SECRET.sub("sk-sluice-...", storable)[:_TEXT_MAX]
