"""The fleet's loop: writes down who lives, then makes the world follow the pure decisions.

Every control plane runs it; an advisory lock lets one decide at a time. It wakes up at once when a
router comes or goes or the state changes, and every second without that.
"""

import asyncio
import time

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database, DatabaseDownError
from control_plane.fleet import model, repository
from control_plane.fleet.presence import Presence
from control_plane.watch.feed import Feed
from sluice.ids import new_id
from sluice.profiles import FRAMES, profile_of

log = structlog.get_logger(__name__)

_TICK_S = 1.0
# After a start or an outage of the database everybody looks absent; they get this long to be heard.
_ROUTERS_RETURN_S = 4.0
_NODES_RETURN_S = model.NODE_LOST_AFTER_S
_PRUNE_INTERVAL_S = 600.0


class Fleet:
    """Owns the presence of routers, and the loop."""

    def __init__(self, database: Database, feed: Feed) -> None:
        self._database = database
        self._feed = feed
        self._wake = asyncio.Event()
        self.presence = Presence(self._wake.set)
        self._heard_since = time.monotonic()  # before that we could not hear everybody
        self._pruned_at = float("-inf")

    def wake(self) -> None:
        """Decide again now."""
        self._wake.set()

    async def run(self) -> None:
        """Run the loop until cancelled."""
        self._heard_since = time.monotonic()
        while True:
            changed = self._feed.changed()
            self._wake.clear()
            try:
                await self._database.run(self._step)
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("fleet_step_failed", error=str(getattr(error, "reason", error)))
                self._heard_since = time.monotonic()
            await self._pause(changed)

    async def _pause(self, changed: asyncio.Event) -> None:
        """Wait for the tick, or until there is something new; at least a moment."""
        await asyncio.sleep(0.02)  # changes that come together are decided together
        waits = (self._wake.wait(), changed.wait())
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(wait) for wait in waits]
            await asyncio.wait(waiting, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()

    async def _step(self, connection: AsyncConnection) -> None:
        departed = set(self.presence.departed)
        await repository.write_routers(connection, self.presence.here(), departed)
        heard_s = time.monotonic() - self._heard_since
        if await repository.try_lead(connection):
            await self._assign(connection, may_take=heard_s > _ROUTERS_RETURN_S)
            if heard_s > _NODES_RETURN_S:
                for node_id in await repository.lose_nodes(connection, model.NODE_LOST_AFTER_S):
                    log.warning("node_lost", node=node_id)
            await self._reconcile(connection)
            if time.monotonic() - self._pruned_at > _PRUNE_INTERVAL_S:
                await repository.prune_changes(connection)
                self._pruned_at = time.monotonic()
        self.presence.departed -= departed

    async def _assign(self, connection: AsyncConnection, *, may_take: bool) -> None:
        cells = await repository.cells(connection)  # before the pools: then none lacks its pool
        engines = {pool.id: pool.engine for pool in await repository.pools(connection)}
        changed = model.assign_cells(
            [cell for cell in cells if profile_of(engines.get(cell.pool_id, "")) is FRAMES],
            await repository.routers(connection),
            may_take=may_take,
        )
        await repository.write_owners(connection, changed)
        for cell in changed:
            log.info("cell_assigned", cell=cell.id, router=cell.router_id, epoch=cell.epoch)

    async def _reconcile(self, connection: AsyncConnection) -> None:
        cells = {cell.pool_id: cell.id for cell in await repository.cells(connection)}
        pools = await repository.pools(connection)
        plan = model.plan_replicas(
            pools,
            cells,
            await repository.nodes(connection),
            await repository.replicas(connection),
            lambda: new_id("replica"),
        )
        profiles = {pool.id: profile_of(pool.engine) for pool in pools}
        await repository.create_replicas(connection, plan.create, profiles)
        await repository.drain_replicas(connection, plan.drain)
        await repository.forget_replicas(connection, plan.forget)
        for replica in plan.create:
            log.info("replica_created", replica=replica.id, node=replica.node_id)
        for event, ids in (("replica_draining", plan.drain), ("replica_forgotten", plan.forget)):
            for replica_id in ids:
                log.info(event, replica=replica_id)
