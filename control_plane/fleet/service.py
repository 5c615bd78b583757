"""The fleet's loop, which stores which routers and nodes are live, and applies pure decisions.

Every control plane runs the loop, and an advisory lock permits one control plane at a time to
decide. The loop runs at once when a router connects or leaves or the state changes, and at least
every second. While a router is missing the loop runs more often, because the requests in the
router's cells wait.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database, DatabaseDownError, end_frozen
from control_plane.fleet import cells as cell_model
from control_plane.fleet import model, preparation, repository
from control_plane.fleet.hours import Clock
from control_plane.fleet.liveness import Liveness
from control_plane.fleet.planner import plan_replicas
from control_plane.fleet.presence import Presence
from control_plane.fleet.probe import refuses
from control_plane.watch.feed import Feed
from sluice.engines import profile_of
from sluice.ids import new_id
from sluice.profiles import FRAMES

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_MISSING_TICK_S = 0.1
# After 30 steps without a change, only each third step decides, because time alone rarely changes a
# decision.
_QUIET_AFTER, _QUIET_EVERY = 30, 3
# After a start or an outage of the database all routers seem absent. Within this many seconds they
# may reconnect before their cells have other owners.
_ROUTERS_RETURN_S = 4.0
_NODES_RETURN_S = model.NODE_LOST_AFTER_S
_PRUNE_INTERVAL_S = 600.0

Prune = Callable[[AsyncConnection], Awaitable[None]]
AskHoldback = Callable[[AsyncConnection], Awaitable[model.Holdback]]


class FleetLoop:
    """Owns the presence of routers, and the loop of the fleet."""

    def __init__(
        self,
        database: Database,
        feed: Feed,
        prune: Sequence[Prune],
        show: Callable[[int], None],
        clock: Clock,
        holdback: AskHoldback,
    ) -> None:
        """Create the loop.

        Args:
            database: Database of the fleet.
            feed: Signals changes of the state.
            prune: Functions that delete old rows of other domains. The leader calls them every ten
                minutes.
            show: Called with the number of replicas without a place, for metrics. The number is 0
                while another control plane leads.
            clock: Counts replica-seconds while this control plane leads.
            holdback: Returns the limits on new replicas while too many replicas answer wrongly.
        """
        self._database = database
        self._feed = feed
        self._prune = prune
        self._show = show
        self._clock = clock
        self._holdback = holdback
        self._wake = asyncio.Event()
        self.presence = Presence(self._wake.set)
        self._liveness = Liveness(self.presence)
        self._heard_since = time.monotonic()  # silence before this monotonic time is ignored
        self._pruned_at = float("-inf")
        self._quiet_steps = 0  # number of consecutive steps without a change
        # addresses of routers with a closed watch, by id, and the time at which their probing ends
        self._missing: dict[str, tuple[str, float]] = {}

    def wake(self) -> None:
        """Start the next round of decisions at once."""
        self._wake.set()

    async def run(self) -> None:
        """Run the loop until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._liveness.run())
            await self._decide()

    async def _decide(self) -> None:
        """Make decisions repeatedly, until cancelled."""
        self._heard_since = time.monotonic()
        while True:
            changed = self._feed.changed()
            self._wake.clear()
            await self._look_for_missing()
            try:
                self.presence.written(*await self._stored())
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("fleet_step_failed", error=str(getattr(error, "reason", error)))
                self._heard_since = time.monotonic()
                self._clock.stop()
                self._quiet_steps = 0
            is_quiet = await self._is_quiet(changed) and not self._missing
            self._quiet_steps = self._quiet_steps + 1 if is_quiet else 0

    async def _stored(self) -> tuple[set[str], set[str]]:
        """Decide, and return the ids of the routers stored as departed, and as gone.

        After 30 steps without a change, two of three calls only store which routers are live.
        """
        if self._quiet_steps > _QUIET_AFTER and self._quiet_steps % _QUIET_EVERY:
            return await self._database.run_singly(self._store_liveness)
        return await self._database.run(self._step)

    async def _look_for_missing(self) -> None:
        """Probe the missing routers, and record the routers that have ended."""
        now = time.monotonic()
        until = now + cell_model.ROUTER_GRACE_S + _TICK_S
        here = self.presence.here()
        for router_id, address in self.presence.departed.items():
            self._missing.setdefault(router_id, (address, until))
        for router_id, (_, news_until) in list(self._missing.items()):
            if router_id in here or router_id in self.presence.gone or now > news_until:
                del self._missing[router_id]
        missing = {router_id: address for router_id, (address, _) in self._missing.items()}
        answers = await asyncio.gather(*map(refuses, missing.values()))
        here = self.presence.here()
        for router_id, has_ended in zip(missing, answers, strict=True):
            if has_ended and router_id not in here:
                log.info("router_ended", router=router_id)
                self.presence.gone.add(router_id)
                del self._missing[router_id]

    async def _is_quiet(self, changed: asyncio.Event) -> bool:
        """Wait for the next tick or a change, and return whether there was no change."""
        await asyncio.sleep(0.02)  # so that changes that arrive together are decided together
        waits = (self._wake.wait(), changed.wait())
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(wait) for wait in waits]
            tick_s = _MISSING_TICK_S if self._missing else _TICK_S
            await asyncio.wait(waiting, timeout=tick_s, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        return not (self._wake.is_set() or changed.is_set())

    async def _store_liveness(self, connection: AsyncConnection) -> tuple[set[str], set[str]]:
        """Store which routers are live, and return the ids of departed and of gone routers."""
        await end_frozen(connection)  # a frozen leader may have locked the routers' rows
        departed, gone = set(self.presence.departed), set(self.presence.gone)
        await repository.write_routers(connection, self.presence.here(), departed, gone)
        return departed, gone

    async def _step(self, connection: AsyncConnection) -> tuple[set[str], set[str]]:
        """Decide once, and return the ids of the routers stored as departed, and as gone."""
        departed, gone = await self._store_liveness(connection)
        heard_s = time.monotonic() - self._heard_since
        if await repository.try_lead(connection):
            if heard_s > _NODES_RETURN_S:
                for node_id in await repository.lose_nodes(connection, model.NODE_LOST_AFTER_S):
                    log.warning("node_lost", node=node_id)
            for pool_id in await preparation.retire_pools(connection):
                log.info("pool_retired", pool=pool_id)
            # read before the pools, so that no cell lacks its pool
            cells = await repository.cells(connection)
            pools = await repository.pools(connection)
            replicas = await repository.replicas(connection)
            self._clock.tick(time.monotonic(), replicas)
            spread = cell_model.spread_pools(pools, cells, replicas)
            if spread.is_change:
                await self._spread(connection, spread)
                cells = await repository.cells(connection)
                replicas = await repository.replicas(connection)
            fleet = (pools, cells, replicas)
            await self._assign(connection, *fleet, may_take=heard_s > _ROUTERS_RETURN_S)
            self._show(await self._reconcile(connection, pools, spread.open, replicas))
            if time.monotonic() - self._pruned_at > _PRUNE_INTERVAL_S:
                await repository.prune_changes(connection)
                for prune in self._prune:
                    await prune(connection)
                self._pruned_at = time.monotonic()
        else:
            self._show(0)
            self._clock.stop()
        return departed, gone

    @staticmethod
    async def _spread(connection: AsyncConnection, spread: cell_model.Spread) -> None:
        """Create, drain and remove cells of the pools, and log the changes."""
        await repository.write_spread(connection, spread)
        for event, ids in (
            ("cell_created", [cell.id for cell in spread.create]),
            ("cell_draining", spread.drain),
            ("cell_kept", spread.revive),
            ("cell_removed", spread.remove),
        ):
            for cell_id in ids:
                log.info(event, cell=cell_id)
        for replica_id, cell_id in spread.move.items():
            log.info("replica_moved", replica=replica_id, cell=cell_id)

    @staticmethod
    async def _assign(
        connection: AsyncConnection,
        pools: Sequence[model.Pool],
        cells: Sequence[model.Cell],
        replicas: Sequence[model.Replica],
        *,
        may_take: bool,
    ) -> None:
        """Assign the cells to routers."""
        engines = {pool.id: pool.engine for pool in pools}
        routed = [cell for cell in cells if profile_of(engines.get(cell.pool_id, "")) is FRAMES]
        routers = await repository.routers(connection)
        replicas_of = cell_model.sizes(replicas)
        changed = cell_model.assign_cells(routed, routers, replicas_of, may_take=may_take)
        if not changed and may_take:
            quiet_s = await repository.owners_unchanged_s(connection)
            moved = cell_model.even_out(routed, routers, replicas_of, quiet_s=quiet_s)
            changed = [] if moved is None else [moved]
        await repository.write_owners(connection, changed)
        for cell in changed:
            log.info("cell_assigned", cell=cell.id, router=cell.router_id, epoch=cell.epoch)

    async def _reconcile(
        self,
        connection: AsyncConnection,
        pools: Sequence[model.Pool],
        homes: Mapping[str, Sequence[str]],
        replicas: Sequence[model.Replica],
    ) -> int:
        """Create and remove replicas, set their roles, and return the number without a place."""
        nodes = await repository.nodes(connection)
        holdback = await self._holdback(connection)
        ahead = await repository.next_places(connection)
        fleet = (pools, homes, nodes, replicas)
        plan = plan_replicas(*fleet, lambda: new_id("replica"), holdback, ahead)
        profiles = {pool.id: profile_of(pool.engine) for pool in pools}
        await repository.create_replicas(connection, plan.create, profiles)
        await repository.drain_replicas(connection, plan.drain)
        await repository.forget_replicas(connection, plan.forget)
        await repository.write_conditions(connection, plan.conditions)
        await repository.write_notes(connection, plan.notes)
        there = plan.applied(replicas)
        sleeps = model.assign_sleep(pools, there)
        await repository.write_sleep(connection, sleeps)
        there = [replace(it, sleeps=sleeps.get(it.id, it.sleeps)) for it in there]
        roles = model.assign_roles(pools, there)
        await repository.write_roles(connection, roles)
        for replica_id, is_asleep in sleeps.items():
            log.info("replica_sleeping" if is_asleep else "replica_waking", replica=replica_id)
        for replica in plan.create:
            log.info("replica_created", replica=replica.id, node=replica.node_id)
        for event, ids in (("replica_draining", plan.drain), ("replica_forgotten", plan.forget)):
            for replica_id in ids:
                log.info(event, replica=replica_id)
        for replica_id, role in roles.items():
            log.info("replica_role_changed", replica=replica_id, role=role or "both")
        return sum(condition.unplaced for condition in plan.conditions.values())
