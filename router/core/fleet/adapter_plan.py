"""Plans the adapters that the replicas of a cell load ahead of requests.

The number of an adapter's copies is proportional to its share of the requests, and adapters with
more requests are planned first. An adapter that does not fit into the replicas' planned memory is
loaded when a request needs it, and that request waits for the load.
"""

from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush, nlargest
from math import ceil, exp2

HALF_LIFE_S = 600.0  # seconds until a request's weight in the demand is halved
KNOWN_MAX = 16_384  # most adapters with a count, above which the less requested half is dropped
LOADS_MAX = 8  # most loads per replica and plan, because engines load while they serve
# Planned copies of an adapter, as a multiple of the replicas that its requests would occupy fully.
# With twice as many copies, placement has a choice, and bursts have capacity.
_COPIES_PER_LOAD = 2.0
_PLANNED_SHARE = 0.875  # planned part of the memory, while requests load adapters into the rest
_SCALE_MAX = 100.0  # half-lives after which all weights are scaled down, to prevent an overflow


class AdapterDemand:
    """The demand for each adapter of a cell, as request counts that decay over time."""

    __slots__ = ("_began_at", "_counts", "_sum")

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._sum = 0.0  # sum of the weights of all requests, with or without an adapter
        self._began_at = 0.0

    def came(self, adapter: str, now: float, requests: float = 1.0) -> None:
        """Record requests for an adapter. An empty adapter only adds to the total load."""
        passed = (now - self._began_at) / HALF_LIFE_S
        if passed > _SCALE_MAX:
            faded = exp2(-min(passed, 1000.0))
            self._counts = {it: count * faded for it, count in self._counts.items()}
            self._sum *= faded
            self._began_at, passed = now, 0.0
        weight = requests * exp2(passed)
        self._sum += weight
        if adapter:
            self._counts[adapter] = self._counts.get(adapter, 0.0) + weight
            if len(self._counts) > KNOWN_MAX:
                kept = nlargest(KNOWN_MAX // 2, self._counts, key=self._counts.__getitem__)
                self._counts = {it: self._counts[it] for it in kept}

    def shares(self, limit: int) -> dict[str, float]:
        """Return the share of all requests for each of the `limit` most requested adapters."""
        counts = self._counts
        most = nlargest(limit, counts, key=counts.__getitem__)
        return {adapter: counts[adapter] / self._sum for adapter in most}


def missing_copies(
    shares: Mapping[str, float],
    rooms: Mapping[str, int],
    held: Mapping[str, Collection[str]],
) -> dict[str, list[str]]:
    """Return the adapters that each replica should load, most requested adapters first.

    Args:
        shares: Share of the cell's requests by adapter, in descending order.
        rooms: Number of adapters that fit on each replica, without replicas that serve none.
        held: Adapters that each replica already has, or is loading.
    """
    holders: dict[str, list[str]] = {}
    for replica_id in rooms:
        for adapter in held.get(replica_id, ()):
            holders.setdefault(adapter, []).append(replica_id)
    left = {replica_id: int(room * _PLANNED_SHARE) for replica_id, room in rooms.items()}
    load = dict.fromkeys(rooms, 0.0)
    order = [(0.0, replica_id) for replica_id in rooms]
    heapify(order)
    loads: dict[str, list[str]] = {}
    for adapter, share in shares.items():
        copies = min(len(rooms), max(1, ceil(_COPIES_PER_LOAD * share * len(rooms))))
        at = [it for it in holders.get(adapter, ()) if left[it] > 0][:copies]
        for replica_id in _lightest(order, load, left, copies - len(at), at):
            at.append(replica_id)
            wanted = loads.setdefault(replica_id, [])
            if len(wanted) < LOADS_MAX:
                wanted.append(adapter)
        for replica_id in at:
            left[replica_id] -= 1
            load[replica_id] += share / len(at)
        if not order:
            break
    return loads


def _lightest(
    order: list[tuple[float, str]],
    load: Mapping[str, float],
    left: Mapping[str, int],
    count: int,
    without: Collection[str],
) -> Iterable[str]:
    """Return the `count` replicas with the least planned load that still have room.

    Args:
        order: Heap of replicas by their load, which may be out of date. The call corrects the
            entries that it visits, and removes full replicas.
        load: Planned share of the requests by replica.
        left: Number of adapters that still fit, by replica.
        count: Number of replicas to return.
        without: Replicas that already have the adapter.
    """
    found: list[str] = []
    aside: list[tuple[float, str]] = []
    while order and len(found) < count:
        was, replica_id = heappop(order)
        if left[replica_id] <= 0:
            continue
        if load[replica_id] > was:
            heappush(order, (load[replica_id], replica_id))
            continue
        aside.append((was, replica_id))
        if replica_id not in without:
            found.append(replica_id)
    for entry in aside:
        heappush(order, entry)
    return found
