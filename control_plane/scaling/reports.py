"""Stores the reports of routers, and finds the pools whose waiting work they report."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import delete, func, or_, select, tuple_
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.fleet.moves_tables import replica_moves
from control_plane.scaling.minutes import forget_minutes
from control_plane.scaling.tables import cell_demands, pool_scalings, scaling_changes

_CHANGES_KEPT_DAYS = 30
_FORGOTTEN_AFTER = timedelta(days=1)  # age at which reports of vanished routers are deleted


async def write_demands(connection: AsyncConnection, router_id: str, rows: Sequence[Any]) -> None:
    """Store a router's reports on its cells.

    A report is ignored if a newer report is stored, or if its cell no longer exists.

    Args:
        connection: Connection for the write.
        router_id: Id of the router.
        rows: Tuples (cell, epoch, number, report).
    """
    known = set(
        await connection.scalars(
            select(tables.cells.c.id).where(tables.cells.c.id.in_([row[0] for row in rows]))
        )
    )
    values = [
        {"cell_id": cell, "router_id": router_id, "epoch": epoch, "number": number, "report": told}
        for cell, epoch, number, told in sorted(rows, key=lambda row: row[0])
        if cell in known
    ]
    if not values:
        return
    await connection.execute(_newer_demands(), values)


# Cached, because building and compiling the statement costs more than its execution for a report.
@cache
def _newer_demands() -> Insert:
    """Return the statement that inserts reports of routers, or replaces older reports."""
    made, t = insert(cell_demands), cell_demands.c
    new = made.excluded
    changed = {name: new[name] for name in ("epoch", "number", "report")}
    return made.on_conflict_do_update(
        index_elements=["cell_id", "router_id"],
        set_=changed | {"received_at": func.now()},
        where=tuple_(new.epoch, new.number) > tuple_(t.epoch, t.number),
    )


async def pools_to_wake(connection: AsyncConnection, cells: Collection[str]) -> set[str]:
    """Return the scaled pools of the given cells for which replicas can be woken, or booted first.

    A pool counts if it has sleeping replicas or no replica, or if another pool of its models has
    sleeping replicas.
    """
    c, p, s = tables.cells.c, tables.pools.c, pool_scalings.c
    query = (
        select(p.id, or_(p.scaled_sleepers > 0, p.scaled_replicas == 0))
        .join(tables.cells, c.pool_id == p.id)
        .join(pool_scalings, s.pool_id == p.id)
        .where(c.id.in_(sorted(cells)), s.is_on)
    )
    found: dict[str, bool] = dict((await connection.execute(query)).tuples().all())
    of_itself = {pool_id for pool_id, is_wakeable in found.items() if is_wakeable}
    if not (rest := found.keys() - of_itself):
        return of_itself
    asleep = set(await connection.scalars(select(p.id).where(p.scaled_sleepers > 0)))
    lists = await pools_of_models(connection) if asleep else []
    return of_itself | {it for it in rest if any(it in of and of & asleep for of in lists)}


async def pools_of_models(connection: AsyncConnection) -> list[set[str]]:
    """Return the ids of the pools of each model that several pools serve."""
    lists = await connection.scalars(select(tables.model_pools.c.pools))
    return [{it["pool_id"] for it in pools} for pools in lists]


async def forget_demands(connection: AsyncConnection) -> None:
    """Delete the reports of vanished routers, and old changes, moves and minutes."""
    old = cell_demands.c.received_at < func.now() - _FORGOTTEN_AFTER
    await connection.execute(delete(cell_demands).where(old))
    kept = timedelta(days=_CHANGES_KEPT_DAYS)
    moved = replica_moves.c.ended_at < func.now() - kept
    await connection.execute(delete(replica_moves).where(moved))
    older = scaling_changes.c.changed_at < func.now() - kept
    await connection.execute(delete(scaling_changes).where(older))
    await forget_minutes(connection)
