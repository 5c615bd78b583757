"""The source of ids: one place, so that simulations can replace it by a seeded source."""

import re
import secrets
import time

# Names of tenants, models, bases, ..., as their makers choose them.
ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32: no i, l, o, u


def base32(value: int, length: int) -> str:
    """Return this many characters of Crockford's base 32, in lower case."""
    digits = [_ALPHABET[(value >> (5 * i)) & 31] for i in range(length)]
    return "".join(reversed(digits))


def base32_value(text: str) -> int:
    """Return the number of such characters; ValueError for others."""
    value = 0
    for character in text:
        value = value << 5 | _ALPHABET.index(character)
    return value


def new_id(prefix: str) -> str:
    """Return `prefix_` + 26 characters: milliseconds, so that ids sort, and 80 random bits."""
    return f"{prefix}_{base32(time.time_ns() // 1_000_000, 10)}{base32(secrets.randbits(80), 16)}"


def new_secret(prefix: str) -> str:
    """Return a secret of 256 random bits; scanners recognise it by its prefix."""
    return f"{prefix}-{secrets.token_urlsafe(32)}"


def is_request_id(text: str) -> bool:
    """Return whether a text may be a request's id, which is also a segment of URL paths.

    `.` and `..` are excluded: in a URL they would name another resource.
    """
    return _REQUEST_ID.fullmatch(text) is not None and text not in {".", ".."}
