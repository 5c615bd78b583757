"""Rows of suspicions: replicas that answer wrongly and have to stay.

Nodes read the base of such a replica as a whole. That is much work for a disk, so a suspicion
counts as new once an hour at most.
"""

from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.quality.tables import suspicions

_OPEN = timedelta(minutes=15)  # agents that are away for longer do not hear of it
_FRESH = timedelta(hours=1)
_OPEN_SUSPICIONS = select(suspicions.c.replica_id, suspicions.c.suspected_at).where(
    suspicions.c.suspected_at > func.now() - _OPEN
)


async def add(connection: AsyncConnection, replica_ids: Iterable[str]) -> None:
    """Store suspicions; those that are younger than an hour stay as they are."""
    rows = [{"replica_id": it} for it in sorted(replica_ids)]
    if not rows:
        return
    added = insert(suspicions).values(rows)
    again = added.on_conflict_do_update(
        index_elements=[suspicions.c.replica_id],
        set_={"suspected_at": func.now()},
        where=suspicions.c.suspected_at < func.now() - _FRESH,
    )
    await connection.execute(again)


async def suspected(connection: AsyncConnection) -> dict[str, int]:
    """Return the times of open suspicions in ms of Unix time, by replica."""
    rows = await connection.execute(_OPEN_SUSPICIONS)
    return {name: int(when.timestamp() * 1e3) for name, when in rows}


async def prune(connection: AsyncConnection) -> None:
    """Delete old suspicions."""
    is_old = suspicions.c.suspected_at < func.now() - 2 * _FRESH
    await connection.execute(delete(suspicions).where(is_old))
