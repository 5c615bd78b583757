"""Chooses the nodes that fetch bases ahead, which are those of the next replicas. Pure."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from control_plane.fleet.model import Node, Pool, Replica
from control_plane.fleet.placement import Placement, in_order

AHEAD_MAX = 4  # largest number of a pool's next replicas whose nodes fetch its base


def ahead_count(wanted: int, growth: int, most: int) -> int:
    """Return the number of next replicas of a pool for which nodes fetch its base.

    Args:
        wanted: Present number of replicas.
        growth: Number of replicas that the forecast adds within an hour.
        most: Largest number of replicas of the pool.
    """
    return max(0, min(max(1, growth), AHEAD_MAX, most - wanted))


def next_places(
    counts: Mapping[str, int],
    pools: Mapping[str, tuple[Pool, str]],
    nodes: Sequence[Node],
    replicas: Sequence[Replica],
    before: Mapping[str, AbstractSet[str]],
    bases_max: int,
) -> dict[str, frozenset[str]]:
    """Return the nodes that shall fetch the base of each pool ahead.

    The next replicas are placed in turns, as the fleet's loop would place them. A node whose
    replicas have the base already is left out.

    Args:
        counts: Number of next replicas by pool.
        pools: Pools with their bases.
        nodes: All nodes.
        replicas: All replicas.
        before: Result of the last round. Its nodes are taken again if nothing speaks for others.
        bases_max: Largest number of bases that a node fetches ahead.
    """
    placement = Placement(nodes, replicas, before)
    bases_on: dict[str, set[str]] = {}
    for replica in replicas:
        if replica.pool_id in pools:
            bases_on.setdefault(replica.node_id, set()).add(pools[replica.pool_id][1])
    coming: dict[str, set[str]] = {}
    found: dict[str, set[str]] = {}
    order = in_order(pools[it][0] for it in counts if it in pools)
    for turn in range(max(counts.values(), default=0)):
        for pool in order:
            place = placement.place(pool) if turn < counts[pool.id] else ""
            if isinstance(place, str):
                continue
            base, bases = pools[pool.id][1], coming.setdefault(place.node_id, set())
            has_place = base in bases or len(bases) < bases_max
            if has_place and base not in bases_on.get(place.node_id, ()):
                bases.add(base)
                found.setdefault(pool.id, set()).add(place.node_id)
    return {pool_id: frozenset(node_ids) for pool_id, node_ids in found.items()}
