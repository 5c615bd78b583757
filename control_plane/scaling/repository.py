"""Reads and writes the rows of scaling, which are reports, observations of pools, and speeds."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Float, and_, cast, exists, func, or_, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.fleet.hours_tables import replica_intervals
from control_plane.fleet.model import Pool, ReplicaState, role_targets
from control_plane.fleet.moves_tables import replica_moves
from control_plane.fleet.next_tables import next_places
from control_plane.scaling.budget import FixedPool, left_of, price_of
from control_plane.scaling.fluid import TTFT_OBJECTIVE_S
from control_plane.scaling.memory import PoolSight
from control_plane.scaling.model import DECODE, PREFILL, FleetBudget, ScalingSettings
from control_plane.scaling.scaled_pool import ScaledPool
from control_plane.scaling.tables import (
    actuator_asks,
    cell_demands,
    engine_speeds,
    pool_scaling_states,
    pool_scalings,
    scaling_budgets,
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
    exists(select(next_places.c.pool_id)),
)

BUDGET = "fleet"  # id of the only row of the table `scaling_budgets`
_GONE = (ReplicaState.LOST, ReplicaState.STOPPED)  # states of replicas that use no accelerator
# kinds of replicas for the budget
_PLACED, _LEAVING = "placed", "leaving"


# --- observations ------------------------------------------------------------------------------


async def clock_s(connection: AsyncConnection) -> float:
    """Return the time of PostgreSQL, in Unix seconds."""
    return float(await connection.scalar(select(_epoch(func.clock_timestamp()))) or 0.0)


async def scaled_pools(
    connection: AsyncConnection, fresh_s: float, pool_ids: Collection[str] | None = None
) -> list[ScaledPool]:
    """Return the present state of pools that have bounds, with two entries for a pool with roles.

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
            said.text.label("condition"),
            *(p.scaled_sleepers, p.scaled_prefill, p.roles.label("pool_roles")),
            actuator_asks.c.warning,
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
    return [
        _scaled_pool(row, seen, role)
        for row in rows
        for role in ((PREFILL, DECODE) if row["pool_roles"].get(PREFILL) else ("",))
    ]


def _part(row: Mapping[Any, Any], replicas: int, role: str) -> int:
    """Return the part of a pool's replicas that a role has."""
    if not role:
        return replicas
    roles, prefill = row["pool_roles"], row["scaled_prefill"]
    if prefill is None:
        pool = Pool("", "", replicas, prefill=roles[PREFILL], decode=roles.get(DECODE, 0))
        prefill, _ = role_targets(pool, replicas)
    prefill = min(prefill, replicas)
    return prefill if role == PREFILL else replicas - prefill


def _settings_of(row: Mapping[Any, Any], role: str) -> ScalingSettings:
    """Return the settings of a pool, or of one of its roles."""
    floor = row["rollout_replicas"] or 0
    accelerators = row["needs"].get("accelerators", 0)
    own = row["roles"].get(role, {})
    return ScalingSettings(
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
        pin_prefill=row["pin_prefill"],
        role_min=own.get("replicas_min", 1),
        role_max=own.get("replicas_max"),
    )


def _scaled_pool(row: Mapping[Any, Any], seen: "_PoolRows", role: str) -> ScaledPool:
    key = row["id"]
    scaled = row["scaled_replicas"]
    planned = _part(row, row["replicas_wanted"] if scaled is None else scaled, role)
    ready, booting = seen.replicas[key, role, "ready"], seen.replicas[key, role, "booting"]
    unplaced = row["unplaced"] or 0
    sight = PoolSight(
        seen.reports.get(key, ()),
        seen.fresh,
        seen.unheard[key],
        ready=ready,
        booting=booting,
        booted_s=seen.booted_s.get(key, ()),
        planned=planned,
        unplaced=min(unplaced, max(0, planned - ready - booting)) if role else unplaced,
        unplaced_s=float(row["unplaced_s"] or 0.0),
        objective_s=seen.objective_s,
        asleep=seen.replicas[key, "", "asleep"],
        sleepers=row["scaled_sleepers"],
        deferrable_s=seen.deferrable_s,
        placed=seen.replicas[key, role, _PLACED],
        leaving=seen.replicas[key, role, _LEAVING],
        waking=seen.replicas[key, role, "waking"],
    )
    kept = [row["engine"], row["engine_options"]]
    configuration = json.dumps(kept, sort_keys=True).encode()
    kind = (row["base_digest"], seen.hardware.get(key, ""))
    return ScaledPool(
        key,
        _settings_of(row, role),
        row["is_on"],
        row["memory"] or {},
        (*kind, hashlib.sha256(configuration).hexdigest()[:16]),
        _part(row, row["replicas_wanted"], role),
        None if scaled is None else planned,
        sight,
        row["scaled_sleepers"],
        (row["warning"] or "") if row["is_on"] else "",
        role,
        (row["condition"] or "") if row["is_on"] else "",
    )


@dataclass(frozen=True, slots=True)
class _PoolRows:
    """The rows of several tables about some pools, grouped by pool."""

    reports: dict[str, list[Any]]
    fresh: frozenset[str]
    unheard: Counter[str]
    replicas: Counter[tuple[str, str, str]]
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


async def _replicas(
    connection: AsyncConnection, ids: Sequence[str]
) -> Counter[tuple[str, str, str]]:
    """Return the numbers of replicas by pool, role and kind.

    Each replica counts for its pool with the role "", too.
    """
    r = tables.replicas.c
    kind = (r.pool_id, r.role, r.state, r.sleeps, r.is_draining)
    query = select(*kind, func.count()).where(
        r.pool_id.in_(ids), r.state.not_in([int(it) for it in _GONE])
    )
    found: Counter[tuple[str, str, str]] = Counter()
    rows = await connection.execute(query.group_by(*kind))
    for pool_id, role, state, sleeps, is_draining, count in rows:
        for of in ("", PREFILL if role == PREFILL else DECODE):
            for name in _kinds_of(state, sleeps=sleeps, is_draining=is_draining):
                found[pool_id, of, name] += count
    return found


def _kinds_of(state: int, *, sleeps: bool, is_draining: bool) -> tuple[str, ...]:
    """Return the kinds of a replica for scaling.

    A ready replica that is about to sleep can be woken like one that sleeps. A replica that boots
    only to sleep has a separate kind.
    """
    if is_draining:
        return (_LEAVING,)
    is_up = state in {ReplicaState.READY, ReplicaState.SLEEPING}
    if not is_up and state != ReplicaState.STARTING:
        return (_PLACED,)
    if sleeps:
        return (_PLACED, "asleep" if is_up else "booting to sleep")
    if state == ReplicaState.SLEEPING:
        return (_PLACED, "booting", "waking")
    return (_PLACED, "ready" if state == ReplicaState.READY else "booting")


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
    r = tables.replicas.c
    is_own = and_(r.pool_id == p.id, r.state.not_in([int(it) for it in _GONE]))
    there = select(func.count()).where(is_own, ~r.is_draining).scalar_subquery()
    leaving = select(func.count()).where(is_own, r.is_draining).scalar_subquery()
    wanted = func.greatest(p.replicas_wanted, func.coalesce(p.rollout_replicas, 0), there) + leaving
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


def _epoch(column: Any) -> Any:
    return func.extract("epoch", column)
