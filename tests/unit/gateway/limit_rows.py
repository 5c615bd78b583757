"""The rows of a batch for Valkey, read as the script reads them."""

from struct import Struct
from typing import NamedTuple

from gateway.limits.buckets import HEAD_FORMAT, LIMIT_FORMAT, NEWS_FORMAT
from sluice.limits import BY_NUMBER

_HEAD, _LIMIT, _NEWS = Struct(HEAD_FORMAT), Struct(LIMIT_FORMAT), Struct(NEWS_FORMAT)


class LimitRow(NamedTuple):
    """What a batch says of a scope."""

    limits: dict[str, float]
    held: int
    back_requests: int = 0
    untold_requests: int = 0
    untold_tokens: int = 0
    back_tokens: float = 0.0


def limit_rows(packed: bytes) -> list[LimitRow]:
    """Return all rows; each limit is the one of its kind, with its window."""
    rows: list[LimitRow] = []
    at = 0
    while at < len(packed):
        count, has_news, held = _HEAD.unpack_from(packed, at)
        at += _HEAD.size
        limits: dict[str, float] = {}
        for _ in range(count):
            number, counted, window_ms, value = _LIMIT.unpack_from(packed, at)
            kind = BY_NUMBER[number]
            assert (counted, window_ms) == (kind.counted, kind.window_ms)
            limits[kind.name] = value
            at += _LIMIT.size
        news = _NEWS.unpack_from(packed, at) if has_news else ()
        at += _NEWS.size if has_news else 0
        rows.append(LimitRow(limits, held, *news))
    return rows
