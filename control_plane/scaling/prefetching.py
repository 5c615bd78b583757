"""Stores the nodes that shall fetch bases ahead, from which each control plane orders fetches."""

import asyncio
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.fleet import repository as fleet
from control_plane.scaling.ahead import next_places


class Prefetching:
    """Chooses the nodes of the next replicas in the rounds of the leader."""

    def __init__(self, bases_max: int) -> None:
        """Create the owner of the choice.

        Args:
            bases_max: Largest number of bases that a node fetches ahead, or 0 for none.
        """
        self._bases_max = bases_max
        # Input and result of the last choice. A large fleet's choice takes a second of a processor,
        # and rarely changes.
        self._last: tuple[Any, dict[str, frozenset[str]]] = (None, {})

    async def look(self, connection: AsyncConnection, counts: Mapping[str, int]) -> None:
        """Choose the nodes, and store them.

        Args:
            connection: Connection of the round's transaction.
            counts: Number of next replicas by pool. A pool without one fetches nothing ahead.
        """
        found: dict[str, frozenset[str]] = {}
        if self._bases_max and any(counts.values()):
            found = await self._chosen(connection, dict(counts))
        await fleet.write_next_places(connection, found)

    async def _chosen(
        self, connection: AsyncConnection, counts: dict[str, int]
    ) -> dict[str, frozenset[str]]:
        p = tables.pools.c
        bases = dict((await connection.execute(select(p.id, p.base_digest))).tuples().all())
        pools = {it.id: (it, bases[it.id]) for it in await fleet.pools(connection)}
        facts = (await fleet.nodes(connection), await fleet.replicas(connection))
        before = await fleet.next_places(connection)
        known = (counts, pools, *facts, before)
        if known != self._last[0]:
            found = await asyncio.to_thread(next_places, *known, self._bases_max)
            # The next round begins with this result.
            self._last = ((*known[:-1], found), found)
        return self._last[1]
