"""Stores the nodes that shall fetch bases ahead, from which each control plane orders fetches."""

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.fleet import repository as fleet
from control_plane.scaling.ahead import next_places


async def write_next_places(
    connection: AsyncConnection, counts: Mapping[str, int], bases_max: int
) -> dict[str, frozenset[str]]:
    """Choose the nodes of the next replicas, store them, and return them by pool.

    Args:
        connection: Connection of the round's transaction.
        counts: Number of next replicas by pool. A pool without one fetches nothing ahead.
        bases_max: Largest number of bases that a node fetches ahead, or 0 for none.
    """
    found: dict[str, frozenset[str]] = {}
    if bases_max and any(counts.values()):
        p = tables.pools.c
        rows = (await connection.execute(select(p.id, p.base_digest))).tuples()
        bases = dict(rows.all())
        pools = {it.id: (it, bases[it.id]) for it in await fleet.pools(connection)}
        facts = (await fleet.nodes(connection), await fleet.replicas(connection))
        before = await fleet.next_places(connection)
        found = next_places(counts, pools, *facts, before, bases_max)
    await fleet.write_next_places(connection, found)
    return found
