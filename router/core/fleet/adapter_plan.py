"""Plans which replicas of a cell hold which adapters before their next requests.

An adapter gets copies by its share of the requests, and the adapters with most requests come first.
Beyond the replicas' memory an adapter is loaded by its own requests, which wait for it.
"""

from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush, nlargest
from math import ceil, exp2

HALF_LIFE_S = 600.0  # of a request's weight
KNOWN_MAX = 16_384  # adapters with a count; then the half with fewest requests is forgotten
LOADS_MAX = 8  # per replica and plan; the engine reads them while it serves
# Copies for the load of one replica: placement needs a choice, and bursts of an adapter room.
_COPIES_PER_LOAD = 2.0
_PLANNED_SHARE = 0.875  # of the memory; the rest is for adapters that requests load
_SCALE_MAX = 100.0  # half-lives; then all weights are scaled down


class AdapterDemand:
    """The requests for each adapter of a cell, the latest with most weight."""

    __slots__ = ("_began_at", "_counts", "_sum")

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._sum = 0.0  # of the weights of all requests, with or without an adapter
        self._began_at = 0.0

    def came(self, adapter: str, now: float, requests: float = 1.0) -> None:
        """Count requests; without an adapter they count in the load alone."""
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
        """Return the shares of the requests, of the adapters with most; at most `limit`."""
        counts = self._counts
        most = nlargest(limit, counts, key=counts.__getitem__)
        return {adapter: counts[adapter] / self._sum for adapter in most}


def missing_copies(
    shares: Mapping[str, float],
    rooms: Mapping[str, int],
    held: Mapping[str, Collection[str]],
) -> dict[str, list[str]]:
    """Return the adapters that each replica should load, the most wanted first.

    Args:
        shares: Share of the cell's requests by adapter, the greatest first.
        rooms: Adapters that each replica may hold; replicas that serve none are left out.
        held: Adapters that are on each replica, or on their way.
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
    """Return the replicas with the least planned load that have room.

    Args:
        order: A heap of replicas by load as it was; it is kept true here, and loses full ones.
        load: Planned share of the requests by replica.
        left: Free places by replica.
        count: Number of replicas.
        without: Replicas that hold the adapter already.
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
