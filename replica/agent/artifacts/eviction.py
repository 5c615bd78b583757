"""Chooses the artifacts to evict from the disk when a new artifact needs room. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

# Seconds after which a use counts half. So an artifact that was used last week is evicted before
# one that was used today.
HALF_LIFE_S = 6 * 3600.0


class Hold(IntEnum):
    """The degree to which an artifact is protected from eviction, from low to high."""

    NONE = 0
    PREFETCHED = 1  # expected to be used on this node, although no request waits for the artifact
    FAST = 2  # a desired replica's base, or in use by an engine, or awaited by a request


@dataclass(frozen=True, slots=True)
class Heat:
    """The amount of use of an artifact, where older uses count less.

    Attributes:
        score: Weighted number of uses at the time `at_s`.
        at_s: Unix time of the score.
    """

    score: float
    at_s: float

    def at(self, now_s: float) -> float:
        """Return the score at the time `now_s`, where each half-life halves it."""
        return self.score * 0.5 ** (max(0.0, now_s - self.at_s) / HALF_LIFE_S)

    def used(self, count: int, now_s: float) -> "Heat":
        """Return the heat after `count` further uses."""
        return Heat(self.at(now_s) + count, now_s)


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """An artifact on the disk.

    Attributes:
        heat: Score of the artifact's use now.
        is_adapter: Whether the artifact is an adapter. Adapters are evicted before bases, because
            bases are slow to fetch.
    """

    digest: str
    size_bytes: int
    heat: float
    is_adapter: bool
    hold: Hold


def to_evict(
    items: Iterable[EvictionCandidate], room_bytes: int, *, needed: bool
) -> list[str] | None:
    """Return the artifacts to evict, the least used adapter first, or None if that is impossible.

    If all evictable artifacts together have too few bytes, none is evicted.

    Args:
        items: All artifacts on the disk.
        room_bytes: Number of bytes to free. For 0 or less, nothing is evicted.
        needed: Whether a request waits for the room. If not, prefetched artifacts stay, because a
            new prefetched artifact is not worth more than they are.
    """
    highest = Hold.PREFETCHED if needed else Hold.NONE
    movable = sorted(
        (item for item in items if item.hold <= highest),
        key=lambda item: (not item.is_adapter, item.hold, item.heat, item.digest),
    )
    chosen: list[EvictionCandidate] = []
    freed = 0
    for item in movable:
        if freed >= room_bytes:
            break
        chosen.append(item)
        freed += item.size_bytes
    if freed < room_bytes:
        return None
    # After the choice of a larger artifact, smaller ones chosen before may be unnecessary.
    for item in reversed(chosen[:]):
        if freed - item.size_bytes >= room_bytes:
            chosen.remove(item)
            freed -= item.size_bytes
    return [item.digest for item in chosen]
