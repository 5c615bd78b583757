"""Reads the rows of the fleet as records, and writes decided changes."""

import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import Float, case, cast, delete, exists, func, literal, select, update
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.fleet.cells import Spread
from control_plane.fleet.model import (
    Accelerator,
    Cell,
    Needs,
    Node,
    Pool,
    Replica,
    ReplicaState,
    Router,
)
from control_plane.fleet.moves_tables import replica_moves
from control_plane.fleet.next_tables import next_places as next_rows
from control_plane.fleet.planner import Condition
from sluice.profiles import Profile
from sluice.wire.agent.v1 import agent_pb2 as wire

_LOCK = 7310520303  # advisory lock that only the control plane deciding about the fleet holds
# Seconds of silence after which a router counts as absent. A control plane that is killed cannot
# report that its routers have left.
_ROUTER_SILENCE_S = 6.0
_CHANGES_KEPT = timedelta(hours=1)
# The number of replicas that operators or the scaling loop want, or that rollouts need if it is
# larger.
_WANTED = func.greatest(
    func.coalesce(tables.pools.c.scaled_replicas, tables.pools.c.replicas_wanted),
    func.coalesce(tables.pools.c.rollout_replicas, 0),
)


async def try_lead(connection: AsyncConnection) -> bool:
    """Return whether this transaction has acquired the right to decide about the fleet."""
    return bool(await connection.scalar(select(func.pg_try_advisory_xact_lock(_LOCK))))


# cached, because building and compiling the statement every second costs more than its execution
@cache
def _seen_routers() -> Insert:
    """Return the statement that inserts routers, or updates the time of their last sighting."""
    t = tables.routers.c
    query = insert(tables.routers)
    changed = {
        "address": query.excluded.address,
        "seen_at": func.now(),
        "came_at": case((t.left_at.is_(None), t.came_at), else_=func.now()),
        "left_at": None,
        "is_gone": False,
    }
    return query.on_conflict_do_update(index_elements=["id"], set_=changed)


async def write_routers(
    connection: AsyncConnection,
    here: Mapping[str, str],
    departed: Iterable[str],
    gone: Iterable[str],
) -> None:
    """Store the routers that are connected to this control plane, have left, or have ended."""
    table = tables.routers
    for ids, values in (
        (sorted(departed), {"left_at": func.now()}),
        (sorted(gone), {"is_gone": True}),
    ):
        if ids:
            unknown = table.c.left_at.is_(None) if "left_at" in values else ~table.c.is_gone
            query = update(table).where(table.c.id.in_(ids), unknown).values(**values)
            await connection.execute(query)
    if here:
        values = [{"id": key, "address": address} for key, address in sorted(here.items())]
        await connection.execute(_seen_routers(), values)


async def routers(connection: AsyncConnection) -> dict[str, Router]:
    """Return all routers that ever connected."""
    table = tables.routers
    silent_s = _seconds_since(table.c.seen_at)
    absent_s = case(
        (table.c.left_at.is_not(None), _seconds_since(table.c.left_at)),
        (silent_s > _ROUTER_SILENCE_S, silent_s),
        else_=literal(0.0),
    )
    # now() is the start of the transaction, so a router that left within it has an absence of 0 s.
    t = table.c
    rows = await connection.execute(
        select(
            t.id, t.address, absent_s, t.left_at.is_not(None), t.is_gone, _seconds_since(t.came_at)
        )
    )
    return {
        key: Router(key, address, max(absent, 1e-6) if has_left else absent, is_gone, here_s)
        for key, address, absent, has_left, is_gone, here_s in rows.tuples()
    }


def _seconds_since(column: Any) -> Any:
    return cast(func.extract("epoch", func.now() - column), Float)


async def cells(connection: AsyncConnection) -> list[Cell]:
    """Return all cells."""
    t = tables.cells.c
    draining_s = func.coalesce(_seconds_since(t.draining_since), 0.0)
    rows = await connection.execute(
        select(
            *(t.id, t.pool_id, t.router_id, t.router_address, t.epoch, t.is_draining), draining_s
        )
    )
    return [Cell(*row) for row in rows.tuples()]


async def owners_unchanged_s(connection: AsyncConnection) -> float:
    """Return the seconds since a cell last changed its owner, infinite without cells."""
    newest = func.max(tables.cells.c.assigned_at)
    unchanged_s = await connection.scalar(select(_seconds_since(newest)))
    return float("inf") if unchanged_s is None else unchanged_s


async def write_spread(connection: AsyncConnection, spread: Spread) -> None:
    """Create, drain and remove cells, and move replicas between them."""
    table = tables.cells
    for cell in spread.create:
        query = insert(table).values(id=cell.id, pool_id=cell.pool_id)
        await connection.execute(query.on_conflict_do_nothing())
    for ids, values in (
        (spread.drain, {"is_draining": True, "draining_since": func.now()}),
        (spread.revive, {"is_draining": False, "draining_since": None}),
    ):
        if ids:
            await connection.execute(update(table).where(table.c.id.in_(ids)).values(**values))
    await _set_replicas(connection, "cell_id", spread.move)
    if spread.remove:
        # Deletion of a cell would delete its replicas as well, so only empty cells are deleted.
        held = exists().where(tables.replicas.c.cell_id == table.c.id)
        await connection.execute(delete(table).where(table.c.id.in_(spread.remove), ~held))


async def write_owners(connection: AsyncConnection, changed: Iterable[Cell]) -> None:
    """Set the owners of cells."""
    for cell in changed:
        await connection.execute(
            update(tables.cells)
            .where(tables.cells.c.id == cell.id)
            .values(
                router_id=cell.router_id,
                router_address=cell.router_address,
                epoch=cell.epoch,
                assigned_at=func.now(),
            )
        )


async def pools(connection: AsyncConnection) -> list[Pool]:
    """Return all pools."""
    t = tables.pools.c
    rows = await connection.execute(
        select(
            *(t.id, t.engine, _WANTED + t.scaled_sleepers, t.cell_replicas_max, t.roles, t.needs),
            *(t.scaled_sleepers, t.scaled_prefill),
        )
    )
    return [
        Pool(
            *(key, engine, wanted, limit, *_roles(roles, prefill, wanted - sleepers)),
            needs=Needs(**needs),
            sleepers=sleepers,
        )
        for key, engine, wanted, limit, roles, needs, sleepers, prefill in rows.tuples()
    ]


def _roles(configured: Mapping[str, int], scaled: int | None, wanted: int) -> tuple[int, int]:
    """Return how many replicas only prefill, and how many only decode.

    Args:
        configured: The operators' numbers of replicas, by role.
        scaled: Number of prefill replicas that the scaling loop wants, or None.
        wanted: Number of replicas that do not sleep. In a scaled pool, none of them has both roles.
    """
    prefill, decode = configured.get("prefill", 0), configured.get("decode", 0)
    if scaled is None or not prefill:
        return prefill, decode
    return scaled, max(0, wanted - scaled) if decode else 0


async def nodes(connection: AsyncConnection) -> list[Node]:
    """Return all nodes."""
    rows = await connection.execute(select(tables.nodes))
    return [_node(typing.cast("Mapping[str, Any]", row)) for row in rows.mappings()]


def _node(row: Mapping[str, Any]) -> Node:
    """Return the node of a row. A node that has not reported its resources counts as unlimited."""
    facts, has_some = row["accelerator_facts"], bool(row["accelerators"])
    memory_bytes = row["memory_bytes"] or None
    accelerators = [
        Accelerator(fact["index"], fact["memory_bytes"], is_cordoned="cordon" in fact)
        for fact in facts
    ]
    is_known = bool(accelerators) or (memory_bytes is not None and not has_some)
    return Node(
        row["id"],
        frozenset(row["engines"]),
        is_lost=row["is_lost"],
        is_cordoned=row["is_cordoned"],
        is_unschedulable=row["is_unschedulable"],
        is_draining=row["is_draining"] or row["is_surplus"],
        memory_bytes=memory_bytes,
        accelerators=tuple(accelerators) if is_known else None,
        rack=f"{row['region']}/{row['rack']}" if row["rack"] else "",
        is_vacated=row["is_vacated"],
    )


async def replicas(connection: AsyncConnection, node_id: str | None = None) -> list[Replica]:
    """Return all replicas, or the replicas of one node without their moves."""
    t, move = tables.replicas.c, replica_moves.c
    moves: dict[str, str] = {}
    query = select(
        *(t.id, t.pool_id, t.cell_id, t.node_id, t.is_draining, t.state, t.grpc_address, t.role),
        *(t.accelerators, t.reservation, t.sleeps),
    ).order_by(t.id)
    if node_id is not None:
        query = query.where(t.node_id == node_id).with_for_update()
    else:
        moving = select(move.replica_id, move.moves_to).where(move.ended_at.is_(None))
        moves = dict((await connection.execute(moving)).tuples().all())
    return [
        Replica(
            *(key, pool, cell, node, is_draining, ReplicaState(state), address, role),
            accelerators=tuple(accelerators),
            reserved=Needs(**reservation),
            sleeps=sleeps,
            moves_to=moves.get(key, ""),
        )
        for (
            *(key, pool, cell, node, is_draining, state, address, role),
            accelerators,
            reservation,
            sleeps,
        ) in (await connection.execute(query)).tuples()
    ]


async def next_places(connection: AsyncConnection) -> dict[str, frozenset[str]]:
    """Return the nodes that fetch a pool's base ahead, by pool."""
    found: dict[str, set[str]] = {}
    for pool_id, node_id in (await connection.execute(select(next_rows))).tuples():
        found.setdefault(pool_id, set()).add(node_id)
    return {pool_id: frozenset(node_ids) for pool_id, node_ids in found.items()}


async def write_next_places(
    connection: AsyncConnection, places: Mapping[str, frozenset[str]]
) -> None:
    """Replace the nodes that fetch the bases of pools ahead, if they have changed."""
    if places == await next_places(connection):
        return
    await connection.execute(delete(next_rows))
    pairs = sorted((pool_id, node_id) for pool_id, found in places.items() for node_id in found)
    rows = [{"pool_id": pool_id, "node_id": node_id} for pool_id, node_id in pairs]
    if rows:
        await connection.execute(insert(next_rows).values(rows))


async def lose_nodes(connection: AsyncConnection, silence_s: float) -> list[str]:
    """Mark nodes that were silent for too long, and their replicas, as lost. Return the nodes."""
    table = tables.nodes
    silent_since = func.now() - timedelta(seconds=silence_s)
    rows = await connection.execute(
        update(table)
        .where(table.c.is_lost.is_(False), table.c.seen_at < silent_since)
        .values(is_lost=True)
        .returning(table.c.id)
    )
    lost = [row[0] for row in rows]
    if lost:
        await connection.execute(
            update(tables.replicas)
            .where(tables.replicas.c.node_id.in_(lost))
            .values(state=int(ReplicaState.LOST))
        )
    return sorted(lost)


async def create_replicas(
    connection: AsyncConnection, created: Sequence[Replica], profiles: Mapping[str, Profile]
) -> None:
    """Insert replicas, with the profile of their pool."""
    if created:
        await connection.execute(
            insert(tables.replicas).values(
                [
                    {
                        "id": replica.id,
                        "pool_id": replica.pool_id,
                        "cell_id": replica.cell_id,
                        "node_id": replica.node_id,
                        "state": int(replica.state),
                        "triton_model": profiles[replica.pool_id].triton_model,
                        "profile": profiles[replica.pool_id].name,
                        "accelerators": list(replica.accelerators),
                        "reservation": {}
                        if replica.reserved == Needs()
                        else asdict(replica.reserved),
                    }
                    for replica in created
                ]
            )
        )


async def drain_replicas(connection: AsyncConnection, ids: Sequence[str]) -> None:
    """Mark replicas to be stopped as soon as their requests have ended."""
    if ids:
        table = tables.replicas
        await connection.execute(update(table).where(table.c.id.in_(ids)).values(is_draining=True))


async def forget_replicas(connection: AsyncConnection, ids: Sequence[str]) -> None:
    """Delete replicas. Their agents then stop the processes."""
    if ids:
        await connection.execute(delete(tables.replicas).where(tables.replicas.c.id.in_(ids)))


async def write_conditions(
    connection: AsyncConnection, conditions: Mapping[str, Condition]
) -> None:
    """Store the reasons for missing replicas. Unchanged reasons are not written again."""
    table = tables.pool_conditions
    rows = await connection.execute(select(table.c.pool_id, table.c.text, table.c.unplaced))
    known = {key: Condition(said, unplaced) for key, said, unplaced in rows.tuples()}
    if over := sorted(known.keys() - conditions.keys()):
        await connection.execute(delete(table).where(table.c.pool_id.in_(over)))
    for pool_id, condition in sorted(conditions.items()):
        if known.get(pool_id) != condition:
            values = {"text": condition.text, "unplaced": condition.unplaced}
            query = insert(table).values(pool_id=pool_id, **values)
            changed = query.on_conflict_do_update(index_elements=["pool_id"], set_=values)
            await connection.execute(changed)


async def write_notes(connection: AsyncConnection, notes: Mapping[str, str]) -> None:
    """Store the progress of draining nodes, and clear the progress of all other nodes."""
    t = tables.nodes.c
    over = update(tables.nodes).where(t.drain_note != "", t.id.not_in(sorted(notes)))
    await connection.execute(over.values(drain_note=""))
    for node_id, note in sorted(notes.items()):
        query = update(tables.nodes).where(t.id == node_id, t.drain_note != note)
        await connection.execute(query.values(drain_note=note))


async def write_roles(connection: AsyncConnection, roles: Mapping[str, str]) -> None:
    """Set the roles of replicas."""
    await _set_replicas(connection, "role", roles)


async def write_sleep(connection: AsyncConnection, sleeps: Mapping[str, bool]) -> None:
    """Set for each replica whether it should sleep."""
    await _set_replicas(connection, "sleeps", sleeps)


async def _set_replicas(
    connection: AsyncConnection, column: str, values: Mapping[str, str | bool]
) -> None:
    """Set a column of replicas, with one statement per value, as there may be 10,000 replicas."""
    ids_of: dict[str | bool, list[str]] = {}
    for replica_id, value in sorted(values.items()):
        ids_of.setdefault(value, []).append(replica_id)
    table = tables.replicas
    for value, ids in ids_of.items():
        query = update(table).where(table.c.id.in_(ids)).values({column: value})
        await connection.execute(query)


async def write_node(connection: AsyncConnection, message: wire.SyncRequest) -> list[str]:
    """Store a node's heartbeat, its facts, and whether it is cordoned.

    Returns:
        Ids of cordons that operators have lifted, but that the agent still reports.
    """
    facts = message.facts
    values = {
        "cpu_count": facts.cpu_count,
        "memory_bytes": facts.memory_bytes,
        "accelerators": list(facts.accelerators),
        "engines": list(facts.engines),
        "seen_at": func.now(),
        "is_lost": False,
        "is_cordoned": message.is_cordoned,
        "cordon_reason": _storable(message.cordon_reason),
        "accelerator_facts": [_accelerator(fact) for fact in facts.accelerator_facts],
        "region": _storable(facts.region),
        "rack": _storable(facts.rack),
    }
    reported = [fact.cordon.id for fact in facts.accelerator_facts if fact.HasField("cordon")]
    query = insert(tables.nodes).values(id=message.node_id, **values)
    row = await connection.execute(
        query.on_conflict_do_update(index_elements=["id"], set_=values).returning(
            tables.nodes.c.lifted_cordons
        )
    )
    lifted: list[str] = row.scalar_one()
    waiting = [cordon_id for cordon_id in lifted if cordon_id in reported]
    if waiting != lifted:
        await connection.execute(
            update(tables.nodes)
            .where(tables.nodes.c.id == message.node_id)
            .values(lifted_cordons=waiting)
        )
    return waiting


def _accelerator(fact: wire.Accelerator) -> dict[str, Any]:
    """Return the stored fields of an accelerator, which rarely change."""
    kept: dict[str, Any] = {
        "index": fact.index,
        "uuid": _storable(fact.uuid),
        "name": _storable(fact.name),
        "memory_bytes": fact.memory_bytes,
    }
    if fact.HasField("cordon"):
        cordon = fact.cordon
        kept["cordon"] = {
            "id": _storable(cordon.id),
            "reason": _storable(cordon.reason),
            "since_unix_ms": cordon.since_unix_ms,
        }
    return kept


def _storable(words: str) -> str:
    return words[:2000].replace("\0", "")


async def write_observed(
    connection: AsyncConnection,
    changed: Iterable[Replica],
    report: Mapping[str, wire.ObservedReplica],
) -> None:
    """Store an agent's report, with changed states of replicas and further facts."""
    table = tables.replicas
    for replica in changed:
        await connection.execute(
            update(table)
            .where(table.c.id == replica.id)
            .values(state=int(replica.state), grpc_address=replica.grpc_address)
        )
    for replica_id, seen in sorted(report.items()):
        values = {
            "metrics_address": seen.metrics_address,
            "pid": max(0, seen.pid),
            "memory_bytes": seen.memory_bytes,
            "restarts": seen.restarts,
            "message": _storable(seen.message),
        }
        await connection.execute(update(table).where(table.c.id == replica_id).values(**values))


async def prune_changes(connection: AsyncConnection) -> None:
    """Delete old changes. The newest change stays, because it has the database's version."""
    t = tables.changes
    newest = select(func.max(t.c.version)).scalar_subquery()
    await connection.execute(
        delete(t).where(t.c.created_at < func.now() - _CHANGES_KEPT, t.c.version < newest)
    )
