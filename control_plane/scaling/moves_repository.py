"""Reads and writes the moves of replicas, and the facts from which the next move is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import Float, cast, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.fleet import repository as fleet
from control_plane.fleet.hours_tables import replica_intervals
from control_plane.fleet.moves_tables import replica_moves
from control_plane.scaling.consolidation import Move, PackedFleet, PackedPool
from control_plane.scaling.nodes import NodeGroup
from control_plane.scaling.tables import scaling_changes

CAUSE = "move"  # cause of a move in the list of changes
_KEPT = timedelta(hours=1)  # time for which the nodes of a move that was given up take no part


@dataclass(frozen=True, slots=True)
class OpenMove:
    """The move under way.

    Attributes:
        why: The move and its reason in words.
        running_s: Seconds since the move began.
        is_there: Whether the replica's row still exists.
        is_draining: Whether the replica drains, because its replacement is ready.
        is_last: Whether the node has no other replica.
    """

    id: int
    pool_id: str
    replica_id: str
    node_id: str
    moves_to: str
    why: str
    running_s: float
    is_there: bool
    is_draining: bool
    is_last: bool


async def open_move(connection: AsyncConnection) -> OpenMove | None:
    """Return the move under way, or None."""
    t, r = replica_moves.c, tables.replicas.c
    others = exists().where(r.node_id == t.node_id, r.id != t.replica_id)
    query = select(
        *(t.id, t.pool_id, t.replica_id, t.node_id, t.moves_to, t.why),
        cast(func.extract("epoch", func.now() - t.began_at), Float).label("running_s"),
        exists().where(r.id == t.replica_id).label("is_there"),
        exists().where(r.id == t.replica_id, r.is_draining).label("is_draining"),
        (~others).label("is_last"),
    ).where(t.ended_at.is_(None))
    row = (await connection.execute(query)).mappings().first()
    return None if row is None else OpenMove(**{name: row[name] for name in OpenMove.__slots__})


async def in_rollouts(connection: AsyncConnection) -> set[str]:
    """Return the pools that serve a release in a rollout, or that will be retired."""
    p, s, r = tables.pools.c, tables.splits.c, tables.releases.c
    named = or_(r.id == s.id + "@" + s.control, r.id == s.id + "@" + s.canary)
    split = select(r.pool_id).join(tables.splits, named)
    busy = select(p.id).where(or_(p.rollout_replicas.is_not(None), p.retire_at.is_not(None)))
    return set(await connection.scalars(split.union(busy)))


async def changed_lately(connection: AsyncConnection, hold_s: float) -> set[str]:
    """Return the pools whose number of replicas has changed within `hold_s` seconds."""
    t = scaling_changes.c
    since = func.now() - timedelta(seconds=hold_s)
    query = select(t.pool_id).where(t.changed_at > since, t.before != t.after).distinct()
    return set(await connection.scalars(query))


async def packed_fleet(
    connection: AsyncConnection,
    pools: Mapping[str, tuple[int, str]],
    groups: Mapping[str, NodeGroup],
    hold_s: float,
) -> PackedFleet:
    """Return the facts from which the next move is chosen.

    Args:
        connection: Connection for the reads.
        pools: Forecast growth and hindrance of each scaled pool.
        groups: Nodes of each actuator.
        hold_s: Least age of a replica that moves.
    """
    c, i, m = tables.pool_conditions.c, replica_intervals.c, replica_moves.c
    waiting = set(await connection.scalars(select(c.pool_id).where(c.unplaced > 0)))
    age_s = cast(func.extract("epoch", func.now() - i.began_at), Float)
    ages = select(i.replica_id, age_s).where(i.ended_at.is_(None), i.is_running)
    kept = select(m.node_id, m.moves_to).where(
        m.result == "given_up", m.ended_at > func.now() - _KEPT
    )
    known = await fleet.pools(connection)
    return PackedFleet(
        await fleet.nodes(connection),
        await fleet.replicas(connection),
        {it.id: PackedPool(it, *pools[it.id]) for it in known if it.id in pools},
        dict((await connection.execute(ages)).tuples().all()),
        groups,
        [it for it in known if it.id in waiting],
        {name for row in (await connection.execute(kept)).tuples() for name in row},
        hold_s,
    )


async def has_waiting(connection: AsyncConnection) -> bool:
    """Return whether a replica of any pool waits for a node with room."""
    c = tables.pool_conditions.c
    return bool(await connection.scalar(select(exists().where(c.unplaced > 0))))


async def begin(connection: AsyncConnection, move: Move) -> None:
    """Record a move, which the fleet's loop carries out."""
    replica = move.replica
    await connection.execute(
        insert(replica_moves).values(
            pool_id=replica.pool_id,
            replica_id=replica.id,
            node_id=replica.node_id,
            moves_to=move.moves_to,
            why=move.text,
        )
    )


async def end(connection: AsyncConnection, move: OpenMove, result: str) -> None:
    """End a move. A replica that does not drain yet then stays where it is."""
    query = update(replica_moves).where(replica_moves.c.id == move.id)
    await connection.execute(query.values(ended_at=func.now(), result=result))


async def write_vacated(connection: AsyncConnection, node_id: str, *, keeps_empty: bool) -> None:
    """Mark the node that is being emptied, or none. Of other marks only empty nodes' are kept.

    Args:
        connection: Connection of the round's transaction.
        node_id: Id of the node that is being emptied, or empty.
        keeps_empty: Whether the marks of empty nodes are kept.
    """
    n, r = tables.nodes.c, tables.replicas.c
    is_over = update(tables.nodes).where(n.is_vacated, n.id != node_id)
    if keeps_empty:
        is_over = is_over.where(exists().where(r.node_id == n.id))
    await connection.execute(is_over.values(is_vacated=False))
    chosen = update(tables.nodes).where(n.id == node_id, ~n.is_vacated)
    await connection.execute(chosen.values(is_vacated=True))


async def record(connection: AsyncConnection, pool_id: str, text: str) -> None:
    """Add a line about a move to the changes of a pool. The number does not change."""
    p = tables.pools.c
    number = select(func.coalesce(p.scaled_replicas, p.replicas_wanted)).where(p.id == pool_id)
    wanted = await connection.scalar(number)
    if wanted is not None:
        values = {"before": wanted, "after": wanted, "cause": CAUSE, "text": text[:2000]}
        await connection.execute(insert(scaling_changes).values(pool_id=pool_id, **values))
