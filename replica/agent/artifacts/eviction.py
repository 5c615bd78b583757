"""Chooses the artifacts to evict from the disk to make room for another. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

# A use counts half after this long: artifacts of last week make way for those of today.
HALF_LIFE_S = 6 * 3600.0


class Hold(IntEnum):
    """How firmly an artifact is kept."""

    NONE = 0
    PREFETCHED = 1  # wanted here, but no request waits for it
    FAST = 2  # a replica's base, used by an engine, or needed by a waiting replica


@dataclass(frozen=True, slots=True)
class Heat:
    """The use of an artifact.

    Attributes:
        score: Uses, older ones counting less, as of `at_s`.
        at_s: Unix time.
    """

    score: float
    at_s: float

    def at(self, now_s: float) -> float:
        """Return the score as of now."""
        return self.score * 0.5 ** (max(0.0, now_s - self.at_s) / HALF_LIFE_S)

    def used(self, count: int, now_s: float) -> "Heat":
        """Return the heat after some more uses."""
        return Heat(self.at(now_s) + count, now_s)


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """An artifact on the disk.

    Attributes:
        heat: Present score of use.
        is_adapter: Whether it is an adapter; adapters go before bases, which take long to fetch.
    """

    digest: str
    size_bytes: int
    heat: float
    is_adapter: bool
    hold: Hold


def to_evict(
    items: Iterable[EvictionCandidate], room_bytes: int, *, needed: bool
) -> list[str] | None:
    """Return the artifacts to evict for `room_bytes`, the coldest adapter first; None: impossible.

    No artifact goes whose eviction would not help, and none at all when all together are not
    enough.

    Args:
        items: All artifacts on the disk.
        room_bytes: Bytes to be freed; 0 or less: none.
        needed: Whether a request waits for the room. Otherwise wanted artifacts stay: one
            prefetched artifact is worth as much as another.
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
    for item in reversed(chosen[:]):  # a large one may make smaller ones before it needless
        if freed - item.size_bytes >= room_bytes:
            chosen.remove(item)
            freed -= item.size_bytes
    return [item.digest for item in chosen]
