"""Rows of suspicions. A suspected replica answers wrongly, but must stay in service.

After a suspicion, the replica's node reads all files of the replica's base from the disk. This
check occupies the disk for long, so a suspicion counts as new at most once an hour.
"""

from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.quality.tables import suspicions

# Age up to which suspicions are sent. Agents that are disconnected for longer miss them.
_OPEN = timedelta(minutes=15)
_FRESH = timedelta(hours=1)
_OPEN_SUSPICIONS = select(suspicions.c.replica_id, suspicions.c.suspected_at).where(
    suspicions.c.suspected_at > func.now() - _OPEN
)
IS_ANY = _OPEN_SUSPICIONS.exists()


async def add(connection: AsyncConnection, replica_ids: Iterable[str]) -> None:
    """Store suspicions. A suspicion that is younger than an hour is not changed."""
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
    """Return the times of open suspicions in Unix milliseconds, by replica."""
    rows = await connection.execute(_OPEN_SUSPICIONS)
    return {name: int(when.timestamp() * 1e3) for name, when in rows}


async def prune(connection: AsyncConnection) -> None:
    """Delete old suspicions."""
    is_old = suspicions.c.suspected_at < func.now() - 2 * _FRESH
    await connection.execute(delete(suspicions).where(is_old))
