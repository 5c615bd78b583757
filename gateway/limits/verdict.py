"""The answer to a reservation, in Valkey's packed form. Pure.

A verdict is a tuple of numbers. The first number is the kind of the limit that refused the
reservation, or 0 if the reservation was granted. Then follow the index of the scope with the
longest wait, and that wait in milliseconds. For each kind of `SHOWN` follows the index of the scope
with the least remaining amount. The last numbers are these amounts. An amount is negative if the
scope is in debt, and `UNLIMITED` if no scope limits the kind.
"""

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

from sluice.limits import KINDS, LimitKind

SHOWN = tuple(kind for kind in KINDS if kind.header)
UNLIMITED = 1e15  # remaining amount without a limit
WAIT_MAX_MS = 86_400_000
# Lua's `struct` has no repeat counts, so every field has its own letter.
FORMAT = "<BBI" + "B" * len(SHOWN) + "d" * len(SHOWN)
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
        wait_ms: Milliseconds to wait.
        levels: Remaining amount of each kind of limit, in each scope.
    """
    rests = [[level.get(kind.name, UNLIMITED) for level in levels] for kind in SHOWN]
    places = [rest.index(min(rest)) for rest in rests]
    least = [min(rest) for rest in rests]
    return (number, scope, min(WAIT_MAX_MS, -int(-wait_ms // 1)), *places, *least)


def rests(verdict: Verdict) -> Iterator[tuple[LimitKind, int, float]]:
    """Yield each shown kind, the scope with the least remaining amount, and that amount."""
    return zip(SHOWN, verdict[_PLACES:_RESTS], verdict[_RESTS:], strict=True)
