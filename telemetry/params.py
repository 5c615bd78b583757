"""Parses query parameters and checks their bounds. Errors name the parameter. Pure."""

import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from sluice.errors import BadRequestError, ErrorCode

UNIX_MS_MAX = 4_102_444_800_000  # 2100
_ID_CHARS_MAX = 256

Query = Mapping[str, str]


def number(query: Query, name: str, least: int, most: int, *, default: int | None = None) -> int:
    """Return an integer within bounds. Raises BadRequestError if a required one is missing."""
    text = query.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"[0-9]{1,15}", text) or not least <= int(text) <= most:
        raise _wrong(name, f"{name} must be {least} to {most}")
    return int(text)


def choice(query: Query, name: str, choices: Collection[str], *, default: str) -> str:
    """Return one of several words. Raises BadRequestError for any other word."""
    text = query.get(name, default)
    if text not in choices:
        raise _wrong(name, f"{name} must be one of {', '.join(choices)}")
    return text


def moment_ms(query: Query, name: str, *, default_ms: int) -> int:
    """Return a time in Unix ms from ISO 8601 text. A time without an offset is UTC."""
    text = query.get(name)
    if text is None:
        return default_ms
    try:
        moment = datetime.fromisoformat(text)
        found = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _wrong(name, f"{name} must be a moment such as 2030-12-31T12:00:00Z") from None
    if not 0 <= found * 1000 <= UNIX_MS_MAX:
        raise _wrong(name, f"{name} must lie between 1970 and 2100")
    return round(found * 1000)


def statuses(query: Query, name: str) -> tuple[int, int]:
    """Return the lowest and highest status of `404`, `5xx` or `200-399`. The default is all."""
    text = query.get(name)
    if text is None:
        return 0, 65535
    found = re.fullmatch(r"([1-5])xx|([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?", text)
    if found is None:
        raise _wrong(name, f"{name} must be an HTTP status, a class or a range: 429, 5xx, 200-399")
    if found[1]:
        return int(found[1]) * 100, int(found[1]) * 100 + 99
    return int(found[2]), int(found[3] or found[2])


def ident(query: Query, name: str) -> str:
    """Return an id, or an empty text if the parameter is missing."""
    text = query.get(name, "")
    if len(text) > _ID_CHARS_MAX:
        raise _wrong(name, f"{name} is no id")
    return text


def required(query: Query, name: str) -> str:
    """Return an id. Raises BadRequestError if the parameter is missing."""
    if not (text := ident(query, name)):
        raise _wrong(name, f"say {name}")
    return text


def iso(unix_ms: int) -> str:
    """Return a time as ISO 8601 text with seconds."""
    return datetime.fromtimestamp(unix_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _wrong(name: str, message: str) -> BadRequestError:
    return BadRequestError(ErrorCode.INVALID_REQUEST, message, param=name)
