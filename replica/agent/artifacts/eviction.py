"""Chooses the artifacts to evict from the disk to make room for a new artifact. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

# Seconds after which a use counts half, so that artifacts used last week are evicted before those
# used today.
HALF_LIFE_S = 6 * 3600.0


class Hold(IntEnum):
    """The degree to which an artifact is protected from eviction."""

    NONE = 0
    PREFETCHED = 1  # wanted on this node, but no request waits for the artifact
    FAST = 2  # a replica's base, in use by an engine, or needed by a waiting replica


@dataclass(frozen=True, slots=True)
class Heat:
    """The amount of use of an artifact, in which older uses count less.

    Attributes:
        score: Number of uses as of `at_s`, with older uses weighted less.
        at_s: Unix time of the score.
    """

    score: float
    at_s: float

    def at(self, now_s: float) -> float:
        """Return the score as of `now_s`."""
        return self.score * 0.5 ** (max(0.0, now_s - self.at_s) / HALF_LIFE_S)

    def used(self, count: int, now_s: float) -> "Heat":
        """Return the heat after `count` further uses."""
        return Heat(self.at(now_s) + count, now_s)


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """An artifact on the disk.

    Attributes:
        heat: Present score of the artifact's use.
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

    Artifacts are evicted only if that frees enough bytes. If all evictable artifacts together are
    not enough, none is evicted.

    Args:
        items: All artifacts on the disk.
        room_bytes: Number of bytes to free. For 0 or less, nothing is evicted.
        needed: Whether a request waits for the room. If not, prefetched artifacts stay, because one
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
    # the eviction of smaller artifacts may be unnecessary after that of a larger one
    for item in reversed(chosen[:]):
        if freed - item.size_bytes >= room_bytes:
            chosen.remove(item)
            freed -= item.size_bytes
    return [item.digest for item in chosen]
