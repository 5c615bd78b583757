"""A fluid model of links, in which the narrowest link of a flow's path limits the flow."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4  # rounds in which the bandwidth that narrower flows leave unused is distributed again
_HOPS = 6
_Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Widths:
    """Bandwidths of the links in bytes per second, for each direction."""

    node: float = 1.25e9  # 10 Gbit/s
    rack: float = 25e9  # 200 Gbit/s
    region: float = 12.5e9  # 100 Gbit/s, to other regions
    store: float = 6.25e9  # 50 Gbit/s, from each region's store


class Links:
    """Flows between nodes, or from a region's store to a node, numbered by slot."""

    def __init__(self, regions: list[int], racks: list[int], widths: Widths) -> None:
        self._count = count = len(regions)
        self._regions, self._racks = regions, racks
        self._rack_at = 2 * count
        self._region_at = self._rack_at + 2 * (max(racks) + 1)
        self._store_at = self._region_at + 2 * (max(regions) + 1)
        self._free_at = self._store_at + max(regions) + 1  # index of a link without a bound
        self._widths = np.full(self._free_at + 1, widths.store)
        self._widths[: self._rack_at] = widths.node
        self._widths[self._rack_at : self._region_at] = widths.rack
        self._widths[self._region_at : self._store_at] = widths.region
        self._widths[self._free_at] = np.inf
        self._ways = np.full((1024, _HOPS), self._free_at)
        self.left: _Array = np.full(1024, np.inf)  # bytes that each flow still has to transfer
        self._used = np.zeros(1024, dtype=bool)
        self._rates = np.zeros(0)
        self._slots: _Array = np.zeros(0, dtype=int)
        self._spare = list(range(1023, -1, -1))
        self._is_stale = True

    def begin(self, source: int | None, target: int, size: float) -> int:
        """Start a flow of `size` bytes from a node, or from the store if None. Return its slot."""
        if not self._spare:
            have = len(self.left)
            self._ways = np.concatenate([self._ways, np.full((have, _HOPS), self._free_at)])
            self.left = np.concatenate([self.left, np.full(have, np.inf)])
            self._used = np.concatenate([self._used, np.zeros(have, dtype=bool)])
            self._spare = list(range(2 * have - 1, have - 1, -1))
        slot = self._spare.pop()
        self._ways[slot] = self._way(source, target)
        self.left[slot] = size
        self._used[slot] = True
        self._is_stale = True
        return slot

    def end(self, slot: int) -> None:
        """Stop a flow."""
        self._used[slot] = False
        self._spare.append(slot)
        self._is_stale = True

    def step(self, step_s: float) -> list[int]:
        """Advance all flows by a time, and return the slots of the finished flows."""
        if self._is_stale:
            self._slots = np.flatnonzero(self._used)
            self._rates = self._share()
            self._is_stale = False
        self.left[self._slots] -= self._rates * step_s
        done: list[int] = self._slots[self.left[self._slots] <= 0.5].tolist()
        return done

    def _way(self, source: int | None, target: int) -> list[int]:
        count, region, rack = self._count, self._regions[target], self._racks[target]
        way = [self._free_at] * _HOPS
        way[0] = count + target
        if source is None:
            way[1] = self._store_at + region
            way[2] = self._rack_at + 2 * rack + 1
            return way
        way[1] = source
        if self._racks[source] != rack:
            way[2] = self._rack_at + 2 * rack + 1
            way[3] = self._rack_at + 2 * self._racks[source]
        if self._regions[source] != region:
            way[4] = self._region_at + 2 * region + 1
            way[5] = self._region_at + 2 * self._regions[source]
        return way

    def _share(self) -> _Array:
        ways = self._ways[self._slots]
        rates = np.zeros(len(ways))
        spare = self._widths.copy()
        running = np.ones(len(ways), dtype=bool)
        for _ in range(_ROUNDS):
            some = ways[running]
            if not len(some):
                break
            counts = np.bincount(some.ravel(), minlength=len(spare))
            more = (spare / np.maximum(counts, 1))[some].min(axis=1)
            rates[running] += more
            spare -= np.bincount(some.ravel(), np.repeat(more, _HOPS), minlength=len(spare))
            spare[self._free_at] = np.inf
            running = (spare > 0.001 * self._widths)[ways].all(axis=1)
        return rates
