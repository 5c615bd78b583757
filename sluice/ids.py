"""The source of all ids and secrets, which simulations replace by a seeded source."""

import re
import secrets
import time

# Names that users choose for tenants, models, bases and other objects.
ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, without i, l, o and u


def base32(value: int, length: int) -> str:
    """Return a number as `length` characters of Crockford's base 32, in lower case."""
    digits = [_ALPHABET[(value >> (5 * i)) & 31] for i in range(length)]
    return "".join(reversed(digits))


def base32_value(text: str) -> int:
    """Return the number that `base32` encoded. Other characters raise ValueError."""
    value = 0
    for character in text:
        value = value << 5 | _ALPHABET.index(character)
    return value


def new_id(prefix: str) -> str:
    """Return `prefix_` and 26 characters, which encode the time in ms and 80 random bits.

    Because the time is first, ids sort by their creation.
    """
    return f"{prefix}_{base32(time.time_ns() // 1_000_000, 10)}{base32(secrets.randbits(80), 16)}"


def new_secret(prefix: str) -> str:
    """Return a secret of 256 random bits, with a prefix that secret scanners recognize."""
    return f"{prefix}-{secrets.token_urlsafe(32)}"


def is_request_id(text: str) -> bool:
    """Return whether a text is a valid request id, which is also used as a URL path segment.

    The texts `.` and `..` are invalid, because in a URL they would name another resource.
    """
    return _REQUEST_ID.fullmatch(text) is not None and text not in {".", ".."}
