"""ETags of objects, and the conditional headers of requests (RFC 9110). Pure."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from sluice.errors import BadRequestError, ErrorCode, PlatformError

_TAGS = re.compile(r'\s*(?:W/)?"[\x21\x23-\x7e]*"\s*(?:,\s*(?:W/)?"[\x21\x23-\x7e]*"\s*)*')
_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"')


def etag(shown: Mapping[str, Any]) -> str:
    """Return the ETag of an object's JSON. The order of the fields does not matter."""
    text = json.dumps(shown, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


def check(headers: Mapping[str, str], shown: Mapping[str, Any] | None) -> None:
    """Check the `If-Match` and `If-None-Match` headers of a write.

    Args:
        headers: Headers of the request.
        shown: The object in the form of a GET, or None if the object does not exist.

    Raises:
        PlatformError: 412 if the object differs from the caller's copy.
        BadRequestError: A header is not a list of ETags.
    """
    wanted, unwanted = headers.get("If-Match"), headers.get("If-None-Match")
    if wanted is not None and not _names(wanted, "If-Match", shown):
        found = "there is no such object" if shown is None else "the object has changed meanwhile"
        raise _failed(f"If-Match: {found}; read it again, then decide again", "If-Match")
    if unwanted is not None and _names(unwanted, "If-None-Match", shown):
        message = "If-None-Match: the object exists already; read it, then use If-Match"
        raise _failed(message, "If-None-Match")


def is_known(headers: Mapping[str, str], tag: str) -> bool:
    """Return whether a reader already has this version (`If-None-Match`). Never raises an error."""
    given = headers.get("If-None-Match", "")
    return tag in {found.removeprefix("W/") for found in _TAG.findall(given)}


def _names(header: str, name: str, shown: Mapping[str, Any] | None) -> bool:
    """Return whether the header names this version. `*` matches any existing object."""
    if header.strip() == "*":
        return shown is not None
    if not _TAGS.fullmatch(header):
        message = f'{name}: * is expected, or tags as GET gives them, like "0a1b2c"'
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=name)
    # Weak tags (W/) never match, because only a strong tag proves that the whole object is equal.
    return shown is not None and etag(shown) in _TAG.findall(header)


def _failed(message: str, param: str) -> PlatformError:
    return PlatformError(ErrorCode.PRECONDITION_FAILED, message, param=param)
