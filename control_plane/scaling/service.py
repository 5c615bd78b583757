"""The scaling loop, which reads the pools with bounds, plans, and writes their numbers of replicas.

Every control plane runs the loop, but only the leader, which has the lease, does the work. If the
leader does not renew the lease, another control plane acquires it. A step reads, decides and writes
in one transaction that locks the row of the lease. So two control planes never decide from the same
state. The process has only figures for metrics in memory.

Between two rounds, sleeping replicas are woken as soon as a router reports waiting work. A pool
without replicas then gets its first. The control plane that receives the report does this, whether
or not it leads. It locks the row of the lease like a round.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.budgets.repository import hold_lease, lock_lease
from control_plane.database import Database, DatabaseDownError
from control_plane.fleet import repository as fleet
from control_plane.scaling import moves_repository, reports, repository
from control_plane.scaling.asking import NodeAsking
from control_plane.scaling.decision import (
    Looked,
    by_pool,
    decision_of,
    memory_of,
    shown,
)
from control_plane.scaling.decision_repository import (
    Decided,
    release_numbers,
    write_decision,
    write_numbers,
)
from control_plane.scaling.memory import Memory, look, without_effect_s
from control_plane.scaling.minutes import PoolMinute, minute_of, write_minute
from control_plane.scaling.model import (
    PREFILL,
    Cause,
    FleetBudget,
    PoolPlan,
    PoolState,
    ScalingReason,
    Shown,
)
from control_plane.scaling.moving import MoveNews, Moving, movable_pool
from control_plane.scaling.nodes import NodesAsk
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.prefetching import Prefetching
from control_plane.scaling.roles import both_served, key_of
from control_plane.scaling.scaled_pool import ScaledPool
from control_plane.scaling.sharing import others_of
from control_plane.scaling.sleeping import wakes
from control_plane.scaling.work import CELLS_MAX, PoolSpeed, checked, told_speed
from control_plane.work_poll import MayHaveWork, unknown
from sluice.ids import new_id
from sluice.wire.control.v1 import control_pb2 as wire

log = structlog.get_logger(__name__)

_LEASE = "scaling"
_LEASE_MIN_S = 5.0
# intervals after which the lease expires, so that it outlasts the pause between two rounds
_LEASE_INTERVALS = 2.5
_REPORTS = 3  # number of reports that a router sends per interval
_FRESH_INTERVALS = 2.0  # number of intervals after which a report no longer describes the present
_DEADLINE_S = 10.0
_PRUNE_LOOKS = 40
_WAKE_GAP_S = 0.1  # least seconds between two checks for work that waits for sleeping replicas
_WAKE_RETRY_S = 1.0
_UNPRICED_NAMED = 5  # most pools without a price that a warning names


class Scaling:
    """Owns the scaling loop, and stores the reports of routers."""

    def __init__(
        self,
        database: Database,
        interval_s: float,
        show: Callable[[Mapping[str, Shown]], None],
        count_late: Callable[[str], None],
        asking: NodeAsking,
        moving: Moving,
        count_move: Callable[[str], None],
        prefetching: Prefetching,
        may_have_work: MayHaveWork = unknown,
    ) -> None:
        """Create the loop. `run` must be started in a TaskGroup.

        Args:
            database: Database of scaling.
            interval_s: Seconds between two rounds.
            show: Called with the figures of each pool, for metrics. The mapping is empty while
                another control plane leads.
            count_late: Called with each pool whose actuator becomes late.
            asking: Requests nodes from actuators.
            moving: Moves replicas so that nodes become free.
            count_move: Called with the result of a move (`MoveNews.result`).
            prefetching: Chooses the nodes that fetch bases ahead.
            may_have_work: Tells whether there may be scaled pools.
        """
        self._database = database
        self._may_have_work = may_have_work
        self._interval_s = interval_s
        self._show = show
        self._count_late = count_late
        self._asking = asking
        self._moving = moving
        self._count_move = count_move
        self._prefetching = prefetching
        self._process = new_id("scaling")
        self._late: set[str] = set()
        self._looks = 0
        self._minute = minute_of(0.0)  # the last minute whose numbers were stored
        # Ids of pools that have reported work that waits, and no replica or sleeping replicas.
        self._waiting: set[str] = set()
        self._has_waiting = asyncio.Event()
        self._lease_s = max(_LEASE_MIN_S, _LEASE_INTERVALS * interval_s)

    async def run(self) -> None:
        """Run the scaling loop until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._asking.run())
            tasks.create_task(self._wake_for_ever())
            await self._look_for_ever()

    async def _look_for_ever(self) -> None:
        while True:
            try:
                if self._may_have_work() or self._looks % _PRUNE_LOOKS == 0:
                    await self.step()
                else:
                    self._skip()
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("scaling_step_failed", error=str(getattr(error, "reason", error)))
                self._rest()
            except Exception:  # a failed round changes no number of replicas
                log.exception("scaling_step_broken")
                self._rest()
            await asyncio.sleep(self._interval_s)

    def _skip(self) -> None:
        """Count a round without scaled pools, which reads nothing."""
        self._looks += 1
        self._late = set()
        self._rest()

    def _rest(self) -> None:
        """Clear figures and requests for nodes, because another control plane may lead."""
        self._show({})
        self._asking.offer({})

    async def _wake_for_ever(self) -> None:
        while True:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            pools, self._waiting = frozenset(self._waiting), set()
            pause_s = _WAKE_GAP_S
            try:
                await self._wake(pools)
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("pool_wake_failed", error=str(getattr(error, "reason", error)))
                self._waiting |= pools
                self._has_waiting.set()
                pause_s = _WAKE_RETRY_S
            except Exception:  # the next round wakes the replicas
                log.exception("pool_wake_broken")
                pause_s = _WAKE_RETRY_S
            await asyncio.sleep(pause_s)

    async def _wake(self, pools: Collection[str]) -> None:
        """Wake sleeping replicas, or boot first ones, for those given pools whose work waits.

        Raises:
            DatabaseDownError: PostgreSQL does not answer.
        """

        async def work(connection: AsyncConnection) -> list[str]:
            await lock_lease(connection, _LEASE)
            fresh_s = max(2.0, _FRESH_INTERVALS * self._interval_s)
            lists = await reports.pools_of_models(connection)
            related = set(pools).union(*(of for of in lists if not of.isdisjoint(pools)))
            found = await repository.scaled_pools(connection, fresh_s, related)
            if any(it.scaled == it.sleepers == 0 and it.id in pools for it in found):
                found = None  # a first replica needs the plan for all pools under their budget
            woken: list[str] = []
            for pool_id, numbers in _woken(
                await look_at(connection, self._interval_s, found), pools
            ).items():
                await write_numbers(connection, numbers)
                woken.append(pool_id)
            return woken

        for pool_id in await self._database.run(work, deadline_s=_DEADLINE_S):
            log.info("pool_woken", pool=pool_id)

    async def step(self) -> None:
        """Run one round, if this control plane leads.

        Raises:
            DatabaseDownError: PostgreSQL does not answer.
        """
        looked, asks, moves = await self._database.run(self._look, deadline_s=_DEADLINE_S)
        self._asking.offer(asks)
        self._show({group[0].pool.id: shown(group) for group in by_pool(looked)})
        self._log_changes(looked)
        for move in moves:
            self._count_move(move.result)
            told = log.warning if move.result == "given_up" else log.info
            told("move_changed", pool=move.pool_id, result=move.result, text=move.text)

    async def report(self, message: wire.ReportDemandRequest) -> int:
        """Store a router's report, and return the milliseconds until its next report.

        Raises:
            ValueError: The report is not valid.
            DatabaseDownError: PostgreSQL does not answer.
        """
        if len(message.cells) > CELLS_MAX:
            raise ValueError(f"a report of {len(message.cells)} cells; at most {CELLS_MAX}")
        rows = [(it.cell_id, it.epoch, it.number, checked(it)) for it in message.cells]
        waiting = {it.cell_id for it in message.cells if any(tier.queued for tier in it.tiers)}

        async def work(connection: AsyncConnection) -> set[str]:
            await reports.write_demands(connection, message.router_id, rows)
            return await reports.pools_to_wake(connection, waiting) if waiting else set()

        if rows and (found := await self._database.run_singly(work)):
            self._waiting |= found
            self._has_waiting.set()
        return round(self._interval_s / _REPORTS * 1000)

    async def _look(
        self, connection: AsyncConnection
    ) -> tuple[list[Looked], dict[str, NodesAsk], list[MoveNews]]:
        if not await hold_lease(connection, _LEASE, self._process, self._lease_s):
            return [], {}, []
        self._looks += 1
        if self._looks % _PRUNE_LOOKS == 1:
            await reports.forget_demands(connection)
        await release_numbers(connection)
        looked = await look_at(connection, self._interval_s)
        measured = {it.pool.speed_key: it.speed for it in looked if it.is_measured and it.speed}
        await repository.write_speeds(connection, measured)
        move = await moves_repository.open_move(connection)
        places = await fleet.next_places(connection)
        for one in looked:
            remember(one.state, one.decided, one.memory.looked_at)
            one.memory.demand_at = one.state.demand_at
        for group in by_pool(looked):
            pool = group[0].pool
            decision = decision_of(group, places.get(pool.id, ()))
            if move is not None and move.pool_id == pool.id:
                told = {"cause": moves_repository.CAUSE, "replicas": decision["wanted"]}
                decision["reasons"].append(told | {"text": move.why})
            await write_decision(connection, pool.id, memory_of(group), decision)
            if pool.is_on:
                await write_numbers(connection, [(one.pool, one.decided) for one in group])
        await self._write_minute(connection, looked)
        # Surplus nodes are written in the same transaction as the numbers of replicas. Otherwise
        # the fleet would drain replicas on nodes that stay.
        boots_s = {it.pool.id: it.state.boot_s(1.0) for it in looked}
        asks = await self._asking.look(connection, boots_s)
        groups = by_pool(it for it in looked if it.pool.is_on)
        movable = {group[0].pool.id: movable_pool(group) for group in groups}
        counts = {pool_id: one.ahead for pool_id, one in movable.items()}
        await self._prefetching.look(connection, counts)
        return looked, asks, await self._moving.look(connection, movable)

    async def _write_minute(self, connection: AsyncConnection, looked: Sequence[Looked]) -> None:
        """Store the numbers of pools if this round is the first of a minute."""
        if not looked:
            return
        minute = minute_of(looked[0].memory.looked_at)
        if minute == self._minute:
            return
        await write_minute(connection, minute, map(_numbers, by_pool(looked)))
        self._minute = minute

    def _log_changes(self, looked: Sequence[Looked]) -> None:
        for one in looked:
            before = one.pool.sight.planned
            if one.pool.is_on and before != one.decided.wanted:
                cause = str(one.decided.decisive.cause)
                log.info(
                    "pool_scaled",
                    pool=one.pool.id,
                    role=one.pool.role,
                    before=before,
                    after=one.decided.wanted,
                    cause=cause,
                )
        late = {one.pool.id for one in looked if one.pool.is_on and one.late_s > 0}
        for pool_id in sorted(late - self._late):
            log.error("scaling_ineffective", pool=pool_id)
            self._count_late(pool_id)
        self._late = late


async def look_at(
    connection: AsyncConnection,
    interval_s: float,
    pools: Sequence[ScaledPool] | None = None,
) -> list[Looked]:
    """Read pools and plan for them, without writing. A pool with roles has two results.

    Args:
        connection: Connection for the reads.
        interval_s: Seconds between two rounds.
        pools: Pools with observed or hypothetical settings. If None, the pools are read from the
            database.
    """
    if pools is None:
        fresh_s = max(2.0, _FRESH_INTERVALS * interval_s)
        pools = await repository.scaled_pools(connection, fresh_s)
    if not pools:
        return []
    now = await repository.clock_s(connection)
    known = await repository.speeds(connection, {it.speed_key for it in pools})
    told = _told_speeds(pools, known)
    speeds = known | told
    budget = await repository.budget(connection, [it.id for it in pools if it.is_on])
    memories = {it.key: Memory.from_json(it.memory, interval_s, it.role) for it in pools}
    states = {
        it.key: look(memories[it.key], it.sight, it.settings, speeds.get(it.speed_key), now)
        for it in pools
    }
    for it in pools:
        states[it.key].partner = it.partner
    lists = await repository.shared_pools(connection)
    # The role DECODE has the key of its pool, and the role PREFILL its own.
    lists += [[(key_of(pool_id, PREFILL), price) for pool_id, price in one] for one in lists]
    others = others_of(lists, partial(_ratio, {it.key: it for it in pools}, memories, speeds))
    for key, found in others.items():
        if key in states:
            states[key].others = found
    plans = _planned(pools, states, budget, now)
    return [
        Looked(
            it,
            memories[it.key],
            states[it.key],
            speeds.get(it.speed_key),
            it.speed_key in told,
            plans[it.key],
            without_effect_s(memories[it.key], states[it.key], plans[it.key].wanted, now),
        )
        for it in pools
    ]


def _ratio(
    pools: Mapping[str, ScaledPool],
    memories: Mapping[str, Memory],
    speeds: Mapping[tuple[str, str, str], PoolSpeed],
    key: str,
    other: str,
) -> float | None:
    """Return the work-seconds of another pool that replace one work-second of a pool.

    The result is None if the other pool is not scaled, or if only one of the pools has roles.
    Before a pool's first replica has measured its speed, the two speeds count as equal.
    """
    if key not in pools or other not in pools or not pools[other].is_on:
        return None
    role = pools[key].role
    if pools[other].role != role:
        return None
    mine, its = (speeds.get(pools[it].speed_key) for it in (key, other))
    came = memories[key].came.values()
    prompt, output = sum(it[1] for it in came), sum(it[2] for it in came)
    if mine is None or its is None:
        return 1.0
    work_s = mine.of_role(role).work_s(prompt, output)
    return its.of_role(role).work_s(prompt, output) / work_s if work_s else 1.0


def _woken(looked: Sequence[Looked], waiting: Collection[str]) -> dict[str, Decided]:
    """Return the numbers of pools that wake sleeping replicas, or boot a first one.

    Args:
        looked: Pools with waiting work, and other pools.
        waiting: Ids of the pools with waiting work.
    """
    on = [one for one in looked if one.pool.is_on]
    keys = {one.pool.key for one in on if one.pool.id in waiting}
    states = {one.pool.key: one.state for one in on}
    counts = wakes(states, keys, on[0].memory.looked_at) if on else {}
    found: dict[str, Decided] = {}
    for group in by_pool(on):
        is_waiting = group[0].pool.key in keys
        woken = {one.pool.key: counts.get(one.pool.key, 0) for one in group}
        if any(woken.values()):
            found[group[0].pool.id] = _woken_plans(group, woken, is_waiting=is_waiting)
        elif is_waiting and (first := _first_plans(group)):
            found[group[0].pool.id] = first
    return found


def _woken_plans(group: Sequence[Looked], woken: Mapping[str, int], *, is_waiting: bool) -> Decided:
    """Return the last plan of a pool, with sleeping replicas woken for each role."""
    states = {one.pool.key: one.state for one in group}
    before = {one.pool.key: one.pool.before for one in group}
    counts = both_served(states, {key: before[key] + woken[key] for key in before})
    waits = max(one.state.facts.backlog_work_s for one in group)
    where = f"{waits:.1f} work-seconds wait" if is_waiting else "work waits in another pool"
    total = sum(woken.values())
    found: list[tuple[ScaledPool, PoolPlan]] = []
    for one in group:
        wanted = counts[one.pool.key]
        reason = ScalingReason(Cause.WAKE, wanted, f"{where}: {total} sleepers wake")
        # Sleeping replicas have no role, so the last state, of the role DECODE, has their number.
        asleep = max(0, one.pool.sleepers - total) if one is group[-1] else 0
        decided = replace(one.decided, wanted=wanted, reasons=(reason,), asleep=asleep)
        found.append((one.pool, decided))
    return found


def _first_plans(group: Sequence[Looked]) -> Decided:
    """Return the plan of a pool without any replica for which work waits. It may be empty."""
    is_empty = not any(one.pool.before or one.pool.sleepers for one in group)
    waits = any(one.decided.wanted and one.state.facts.backlog_work_s for one in group)
    if not is_empty or not waits:
        return []
    found: list[tuple[ScaledPool, PoolPlan]] = []
    for one in group:
        wanted = one.decided.wanted
        reason = ScalingReason(Cause.WAKE, wanted, "work waits, and the pool has no replica")
        found.append((one.pool, replace(one.decided, reasons=(*one.decided.reasons, reason))))
    return found


def _planned(
    pools: Sequence[ScaledPool], states: Mapping[str, PoolState], budget: FleetBudget, now: float
) -> dict[str, PoolPlan]:
    """Plan for scaled pools together within the budget, and for each switched-off pool alone."""
    on = {it.key: states[it.key] for it in pools if it.is_on}
    found = {key: _with_unpriced(it, budget) for key, it in plan(on, budget, now).items()}
    # Without a budget, each pool is planned as if it were alone.
    off = {it.key: states[it.key] for it in pools if not it.is_on}
    return found | plan(off, FleetBudget(), now)


def _with_unpriced(decided: PoolPlan, budget: FleetBudget) -> PoolPlan:
    """Return a plan with a warning about pools that the budget in money does not include."""
    if not budget.unpriced:
        return decided
    named = ", ".join(budget.unpriced[:_UNPRICED_NAMED])
    more = " and others" if budget.unpriced[_UNPRICED_NAMED:] else ""
    warning = (
        f"the budget in money does not include {named}{more}, which are sized by hand and have no"
        " price: set accelerator_price of the budget"
    )
    return replace(decided, warnings=(*decided.warnings, warning))


def _told_speeds(
    pools: Sequence[ScaledPool], known: Mapping[tuple[str, str, str], PoolSpeed]
) -> dict[tuple[str, str, str], PoolSpeed]:
    """Return the recently measured speeds, smoothed."""
    told: dict[tuple[str, str, str], PoolSpeed] = {}
    for pool in pools:
        if pool.role == PREFILL:
            continue  # both roles of a pool have the same reports
        fresh = [report for report in pool.sight.reports if report.key in pool.sight.fresh]
        if (speed := told_speed(fresh)) is not None:
            before = told.get(pool.speed_key, known.get(pool.speed_key))
            told[pool.speed_key] = speed if before is None else before.learned(speed)
    return told


def _numbers(group: Sequence[Looked]) -> PoolMinute:
    facts = [one.state.facts for one in group]
    return PoolMinute(
        group[0].pool.id,
        sum(one.decided.wanted for one in group),
        sum(it.ready for it in facts),
        sum(it.booting for it in facts),
        facts[-1].asleep,
        sum(one.state.history.now for one in group),
    )
