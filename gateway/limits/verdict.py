"""The answer to a reservation, as Valkey packs it. Pure.

A tuple: the number of the kind of limit that refused it (0: it was granted), the place of the scope
that makes the caller wait longest, milliseconds until there is room if nobody else comes; then of
each kind of `SHOWN` the place of the scope with the least left, and then of each what is left
there: negative when it is owed, above any limit when no scope has one.
"""

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

from sluice.limits import KINDS, LimitKind

SHOWN = tuple(kind for kind in KINDS if kind.header)
UNLIMITED = 1e15  # what is left where nothing is limited
WAIT_MAX_MS = 86_400_000
FORMAT = "<BBI" + "B" * len(SHOWN) + "d" * len(SHOWN)  # as Lua has it, without counts
VERDICT = Struct(FORMAT)
_PLACES = 3
_RESTS = _PLACES + len(SHOWN)

Verdict = tuple[Any, ...]


def verdict_of(
    number: int, scope: int, wait_ms: float, levels: Sequence[dict[str, float]]
) -> Verdict:
    """Return a verdict.

    Args:
        number: Number of the kind of limit.
        scope: Index of the scope.
        wait_ms: How long to wait.
        levels: Rest of each kind of limit, in each scope.
    """
    rests = [[level.get(kind.name, UNLIMITED) for level in levels] for kind in SHOWN]
    places = [rest.index(min(rest)) for rest in rests]
    least = [min(rest) for rest in rests]
    return (number, scope, min(WAIT_MAX_MS, -int(-wait_ms // 1)), *places, *least)


def rests(verdict: Verdict) -> Iterator[tuple[LimitKind, int, float]]:
    """Yield each kind that is shown, the place of the scope with the least left, and that."""
    return zip(SHOWN, verdict[_PLACES:_RESTS], verdict[_RESTS:], strict=True)
