"""Reads and writes the rows of scaling, which are reports, observations of pools, and decisions."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Float, cast, exists, func, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.fleet.hours_tables import replica_intervals
from control_plane.fleet.model import ReplicaState
from control_plane.fleet.moves_tables import replica_moves
from control_plane.scaling.budget import FixedPool, left_of, price_of
from control_plane.scaling.fluid import TTFT_OBJECTIVE_S
from control_plane.scaling.memory import PoolSight
from control_plane.scaling.model import FleetBudget, PoolPlan, ScalingSettings
from control_plane.scaling.tables import (
    actuator_asks,
    cell_demands,
    engine_speeds,
    pool_scaling_states,
    pool_scalings,
    scaling_budgets,
    scaling_changes,
)
from control_plane.scaling.work import PoolSpeed, restored
from sluice.deadlines import admission_ms

# Without scaled pools, a round only undoes the decisions about pools that were scaled before.
HAS_WORK = or_(
    exists(select(pool_scalings.c.pool_id)),
    exists().where(
        or_(tables.pools.c.scaled_replicas.is_not(None), tables.pools.c.scaled_sleepers > 0)
    ),
    exists().where(tables.nodes.c.is_surplus),
    exists(select(actuator_asks.c.name)),
    exists().where(replica_moves.c.ended_at.is_(None)),
)

BUDGET = "fleet"  # id of the only row of the table `scaling_budgets`


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """A pool that has bounds for scaling.

    Attributes:
        settings: Operators' settings. Minimum and maximum are raised to the replicas that rollouts
            need.
        is_on: Whether decisions are carried out.
        memory: Stored record of the pool, which `Memory.from_json` reads.
        speed_key: Base, hardware and configuration of the pool's replicas.
        hand: Number of replicas set by operators, used while the pool is not scaled.
        scaled: Number of replicas of the last plan in effect, or None without a plan.
        sight: Present observations of the pool.
        sleepers: Number of sleeping replicas of the last plan.
        ask_warning: Warning about the pool's actuator, or an empty text.
    """

    id: str
    settings: ScalingSettings
    is_on: bool
    memory: Mapping[str, Any]
    speed_key: tuple[str, str, str]
    hand: int
    scaled: int | None
    sight: PoolSight
    sleepers: int = 0
    ask_warning: str = ""


# --- observations ------------------------------------------------------------------------------


async def clock_s(connection: AsyncConnection) -> float:
    """Return the time of PostgreSQL, in Unix seconds."""
    return float(await connection.scalar(select(_epoch(func.clock_timestamp()))) or 0.0)


async def scaled_pools(
    connection: AsyncConnection, fresh_s: float, pool_ids: Collection[str] | None = None
) -> list[ScaledPool]:
    """Return the present state of pools that have bounds.

    Args:
        connection: Connection for the reads.
        fresh_s: Greatest age in seconds of a report that describes the present.
        pool_ids: Ids of the pools, or None for all pools.
    """
    p, s, kept, said = (
        tables.pools.c,
        pool_scalings.c,
        pool_scaling_states.c,
        tables.pool_conditions.c,
    )
    query = (
        select(
            *(p.id, p.base_digest, p.engine, p.engine_options, p.needs, p.replicas_wanted),
            *(p.scaled_replicas, p.rollout_replicas, *s, kept.memory, said.unplaced),
            *(p.scaled_sleepers, actuator_asks.c.warning),
            (_epoch(s.pin_until)).label("pin_until_s"),
            _accelerator_price().label("accelerator_price"),
            _epoch(func.now() - said.since).label("unplaced_s"),
        )
        .join(pool_scalings, s.pool_id == p.id)
        .outerjoin(pool_scaling_states, kept.pool_id == p.id)
        .outerjoin(tables.pool_conditions, said.pool_id == p.id)
        .outerjoin(actuator_asks, actuator_asks.c.name == s.actuator)
        .order_by(p.id)
    )
    if pool_ids is not None:
        query = query.where(p.id.in_(sorted(pool_ids)))
    rows = (await connection.execute(query)).mappings().all()
    ids = [row["id"] for row in rows]
    if not ids:
        return []
    seen = await _PoolRows.read(connection, ids, fresh_s)
    return [_scaled_pool(row, seen) for row in rows]


def _scaled_pool(row: Mapping[Any, Any], seen: "_PoolRows") -> ScaledPool:
    key = row["id"]
    needs, options = row["needs"], row["engine_options"]
    floor = row["rollout_replicas"] or 0
    accelerators = needs.get("accelerators", 0)
    settings = ScalingSettings(
        replicas_min=max(row["replicas_min"], floor),
        replicas_max=max(row["replicas_max"], floor),
        minute_worth=row["minute_worth"],
        idle_s=row["idle_s"],
        accelerators=accelerators,
        price=price_of(row["price"], accelerators, row["accelerator_price"] or 0.0),
        pin=row["pin"],
        pin_until=float("inf") if row["pin_until_s"] is None else float(row["pin_until_s"]),
        is_paused=row["is_paused"],
        hold_s=row["hold_s"],
        sleepers_share=row["sleepers_share"],
        sleepers_min=row["sleepers_min"],
        rollout_replicas=floor,
    )
    planned = row["scaled_replicas"]
    sight = PoolSight(
        seen.reports.get(key, ()),
        seen.fresh,
        seen.unheard[key],
        ready=seen.replicas[key, "ready"],
        booting=seen.replicas[key, "booting"],
        booted_s=seen.booted_s.get(key, ()),
        planned=row["replicas_wanted"] if planned is None else planned,
        unplaced=row["unplaced"] or 0,
        unplaced_s=float(row["unplaced_s"] or 0.0),
        objective_s=seen.objective_s,
        asleep=seen.replicas[key, "asleep"],
        sleepers=row["scaled_sleepers"],
        deferrable_s=seen.deferrable_s,
    )
    configuration = json.dumps([row["engine"], options], sort_keys=True).encode()
    kind = (row["base_digest"], seen.hardware.get(key, ""))
    return ScaledPool(
        key,
        settings,
        row["is_on"],
        row["memory"] or {},
        (*kind, hashlib.sha256(configuration).hexdigest()[:16]),
        row["replicas_wanted"],
        planned,
        sight,
        row["scaled_sleepers"],
        (row["warning"] or "") if row["is_on"] else "",
    )


@dataclass(frozen=True, slots=True)
class _PoolRows:
    """The rows of several tables about some pools, grouped by pool."""

    reports: dict[str, list[Any]]
    fresh: frozenset[str]
    unheard: Counter[str]
    replicas: Counter[tuple[str, str]]
    booted_s: dict[str, list[float]]
    hardware: dict[str, str]
    objective_s: dict[int, float]
    deferrable_s: dict[int, float]

    @classmethod
    async def read(
        cls, connection: AsyncConnection, ids: Sequence[str], fresh_s: float
    ) -> "_PoolRows":
        """Read the rows of the given pools, in which a fresh report is at most `fresh_s` old."""
        reports, fresh, unheard = await _reports(connection, ids, fresh_s)
        return cls(
            reports,
            fresh,
            unheard,
            await _replicas(connection, ids),
            await _booted_s(connection, ids),
            await _hardware(connection, ids),
            *await _objectives(connection),
        )


async def _reports(
    connection: AsyncConnection, ids: Sequence[str], fresh_s: float
) -> tuple[dict[str, list[Any]], frozenset[str], Counter[str]]:
    """Return the reports by pool, the fresh reports' keys, and the numbers of unheard cells."""
    c, d = tables.cells.c, cell_demands.c
    query = (
        select(
            *(c.pool_id, c.id, c.router_id, d.router_id, d.epoch, d.report),
            _epoch(func.now() - d.received_at),
        )
        .outerjoin(cell_demands, d.cell_id == c.id)
        .where(c.pool_id.in_(ids), ~c.is_draining)
    )
    reports: dict[str, list[Any]] = {}
    fresh: set[str] = set()
    cells: dict[str, str] = {}
    heard: set[str] = set()
    for pool_id, cell_id, owner, router_id, epoch, report, age_s in await connection.execute(query):
        cells[cell_id] = pool_id
        if router_id is None:
            continue
        key = f"{cell_id} {router_id}"
        reports.setdefault(pool_id, []).append(restored(key, epoch, report))
        if router_id == owner and float(age_s) <= fresh_s:
            fresh.add(key)
            heard.add(cell_id)
    unheard = Counter(pool_id for cell_id, pool_id in cells.items() if cell_id not in heard)
    return reports, frozenset(fresh), unheard


async def _replicas(connection: AsyncConnection, ids: Sequence[str]) -> Counter[tuple[str, str]]:
    r = tables.replicas.c
    states = (ReplicaState.READY, ReplicaState.STARTING, ReplicaState.SLEEPING)
    kind = (r.pool_id, r.state, r.sleeps)
    query = select(*kind, func.count()).where(
        r.pool_id.in_(ids), ~r.is_draining, r.state.in_([int(it) for it in states])
    )
    found: Counter[tuple[str, str]] = Counter()
    for pool_id, state, sleeps, count in await connection.execute(query.group_by(*kind)):
        found[pool_id, _kind_of(state, sleeps=sleeps)] += count
    return found


def _kind_of(state: int, *, sleeps: bool) -> str:
    """Return the kind of a replica for scaling.

    A ready replica that is about to sleep can be woken like one that sleeps. A replica that boots
    only to sleep has a separate kind.
    """
    if sleeps:
        return "booting to sleep" if state == ReplicaState.STARTING else "asleep"
    if state == ReplicaState.SLEEPING:
        return "booting"
    return "ready" if state == ReplicaState.READY else "booting"


async def _booted_s(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, list[float]]:
    """Return the boot times of the replicas that became ready since the last round.

    A boot time is the length of a replica's first interval, which begins when the replica is
    placed. Replicas that were restarted or have slept are left out.
    """
    r, now, before = tables.replicas.c, replica_intervals, replica_intervals.alias()
    earlier, kept = replica_intervals.alias(), pool_scaling_states.c
    first = select(func.min(before.c.began_at)).where(before.c.replica_id == r.id).scalar_subquery()
    query = (
        select(r.pool_id, cast(_epoch(now.c.began_at - first), Float))
        .join(now, now.c.replica_id == r.id)
        .join(pool_scaling_states, kept.pool_id == r.pool_id)
        .where(
            r.pool_id.in_(ids),
            r.state == int(ReplicaState.READY),
            r.restarts == 0,
            now.c.ended_at.is_(None),
            now.c.is_running,
            now.c.began_at > kept.decided_at,
            ~exists().where(
                earlier.c.replica_id == r.id,
                earlier.c.is_running,
                earlier.c.began_at < now.c.began_at,
            ),
        )
    )
    found: dict[str, list[float]] = {}
    for pool_id, boot_s in await connection.execute(query):
        if boot_s > 0:
            found.setdefault(pool_id, []).append(float(boot_s))
    return found


async def _hardware(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, str]:
    """Return the most frequent hardware of each pool's replicas."""
    r, n = tables.replicas.c, tables.nodes.c
    query = (
        select(r.pool_id, n.accelerator_facts, n.cpu_count, func.count())
        .join(tables.nodes, n.id == r.node_id)
        .where(r.pool_id.in_(ids))
        .group_by(r.pool_id, n.accelerator_facts, n.cpu_count)
    )
    votes: dict[str, Counter[str]] = {}
    for pool_id, facts, cpus, count in await connection.execute(query):
        names = sorted({fact.get("name", "") for fact in facts} - {""})
        votes.setdefault(pool_id, Counter())[", ".join(names) or f"{cpus} CPUs"] += count
    return {pool_id: counts.most_common(1)[0][0] for pool_id, counts in votes.items()}


async def _objectives(connection: AsyncConnection) -> tuple[dict[int, float], dict[int, float]]:
    """Return the TTFT objectives of all tiers, and of preemptible tiers, in seconds by priority."""
    t = tables.tiers.c
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    query = select(t.priority, t.ttft_deadline_ms, t.is_preemptible)
    for priority, told_ms, is_preemptible in await connection.execute(query):
        deadline_ms = admission_ms(told_ms, is_preemptible=is_preemptible)
        if not deadline_ms:
            continue
        for objectives in found if is_preemptible else found[:1]:
            objectives[priority] = min(objectives.get(priority, float("inf")), deadline_ms / 1000)
    return found


async def objectives_ms(connection: AsyncConnection) -> dict[str, int]:
    """Return the TTFT objectives of all tiers but preemptible ones, in milliseconds by tier."""
    t = tables.tiers.c
    query = select(t.id, t.ttft_deadline_ms).where(~t.is_preemptible)
    default_ms = round(1000 * TTFT_OBJECTIVE_S)
    return {key: told_ms or default_ms for key, told_ms in await connection.execute(query)}


async def budget(connection: AsyncConnection, besides: Iterable[str]) -> FleetBudget:
    """Return the budget that remains for the scaled pools, without the other pools' replicas.

    Args:
        connection: Connection for the reads.
        besides: Ids of the scaled pools.
    """
    t, p, s = scaling_budgets.c, tables.pools.c, pool_scalings.c
    told = select(t.accelerators, t.price, t.accelerator_price).where(t.id == BUDGET)
    if (row := (await connection.execute(told)).first()) is None:
        return FleetBudget()
    wanted = func.greatest(p.replicas_wanted, func.coalesce(p.rollout_replicas, 0))
    others = (
        select(p.id, wanted, p.needs, func.coalesce(s.price, 0.0))
        .outerjoin(pool_scalings, s.pool_id == p.id)
        .where(p.id.not_in(sorted(besides)))
        .order_by(p.id)
    )
    fixed = [
        FixedPool(key, count, needs.get("accelerators", 0), price)
        for key, count, needs, price in await connection.execute(others)
    ]
    accelerators, price, accelerator_price = row
    bounds = FleetBudget(
        float("inf") if accelerators is None else accelerators,
        float("inf") if price is None else price,
    )
    return left_of(bounds, fixed, accelerator_price)


def _accelerator_price() -> Any:
    t = scaling_budgets.c
    return select(t.accelerator_price).where(t.id == BUDGET).scalar_subquery()


async def shared_pools(connection: AsyncConnection) -> list[list[tuple[str, float]]]:
    """Return, for each model that several pools serve, the pools with their prices."""
    t = tables.model_pools.c
    lists = await connection.scalars(select(t.pools).order_by(t.id))
    return [[(it["pool_id"], it["price"]) for it in pools] for pools in lists]


# --- speeds ------------------------------------------------------------------------------------


async def speeds(
    connection: AsyncConnection, keys: Collection[tuple[str, str, str]]
) -> dict[tuple[str, str, str], PoolSpeed]:
    """Return the measured speeds by base, hardware and configuration."""
    t = engine_speeds.c
    key = (t.base_digest, t.hardware, t.configuration)
    query = select(*key, t.prompt_token_s, t.output_token_s, t.sequences)
    query = query.where(tuple_(*key).in_(sorted(keys)))
    return {
        (base, hardware, configuration): PoolSpeed(*speed)
        for base, hardware, configuration, *speed in await connection.execute(query)
    }


async def write_speeds(
    connection: AsyncConnection, found: Mapping[tuple[str, str, str], PoolSpeed]
) -> None:
    """Store the present speeds of replicas."""
    names = ("prompt_token_s", "output_token_s", "sequences")
    for key, speed in sorted(found.items()):
        values = {name: getattr(speed, name) for name in names} | {"measured_at": func.now()}
        kind = dict(zip(("base_digest", "hardware", "configuration"), key, strict=True))
        query = insert(engine_speeds).values(**kind, **values)
        await connection.execute(
            query.on_conflict_do_update(index_elements=list(kind), set_=values)
        )


# --- decisions ---------------------------------------------------------------------------------


async def write_decision(
    connection: AsyncConnection,
    pool: ScaledPool,
    memory: Mapping[str, Any],
    decision: Mapping[str, Any],
) -> None:
    """Store the record of a pool and the decision of a round."""
    values = {"memory": memory, "decision": decision, "decided_at": func.now()}
    query = insert(pool_scaling_states).values(pool_id=pool.id, **values)
    await connection.execute(query.on_conflict_do_update(index_elements=["pool_id"], set_=values))


async def write_number(connection: AsyncConnection, pool: ScaledPool, decided: PoolPlan) -> bool:
    """Set the decided number of replicas of a pool. Return whether the number changed."""
    before = pool.hand if pool.scaled is None else pool.scaled
    p = tables.pools.c
    is_other = or_(
        p.scaled_replicas.is_distinct_from(decided.wanted), p.scaled_sleepers != decided.asleep
    )
    changed = update(tables.pools).where(p.id == pool.id, is_other)
    await connection.execute(
        changed.values(scaled_replicas=decided.wanted, scaled_sleepers=decided.asleep)
    )
    if before == decided.wanted:
        return False
    last = decided.reasons[-1]
    await connection.execute(
        insert(scaling_changes).values(
            pool_id=pool.id,
            before=before,
            after=decided.wanted,
            cause=str(decisive(decided).cause),
            text="; ".join(reason.text for reason in decided.reasons)[:2000] or last.text,
        )
    )
    return True


def decisive(decided: PoolPlan) -> Any:
    """Return the last reason whose number of replicas is the wanted number."""
    reasons = decided.reasons
    return next((it for it in reversed(reasons) if it.replicas == decided.wanted), reasons[-1])


async def release_numbers(connection: AsyncConnection) -> None:
    """Restore the operators' numbers of replicas in pools that are no longer scaled."""
    p, s = tables.pools.c, pool_scalings.c
    is_scaled = select(s.pool_id).where(s.pool_id == p.id, s.is_on).exists()
    held = or_(p.scaled_replicas.is_not(None), p.scaled_sleepers > 0)
    query = update(tables.pools).where(held, ~is_scaled)
    await connection.execute(query.values(scaled_replicas=None, scaled_sleepers=0))


def _epoch(column: Any) -> Any:
    return func.extract("epoch", column)
