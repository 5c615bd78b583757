"""Stores the numbers of replicas of each scaled pool once a minute, for charts of a day."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.scaling.tables import scaling_minutes

MINUTE_S = 60
KEPT_DAYS = 8
NUMBERS = ("wanted", "ready", "booting", "asleep", "demand")


@dataclass(frozen=True, slots=True)
class PoolMinute:
    """The numbers of a pool at the first round of a minute.

    Attributes:
        pool_id: Id of the pool.
        wanted: Planned number of replicas, without sleeping replicas.
        ready: Replicas that serve.
        booting: Replicas that have been requested and do not serve yet.
        asleep: Sleeping replicas.
        demand: Demand in work-seconds per second.
    """

    pool_id: str
    wanted: int
    ready: int
    booting: int
    asleep: int
    demand: float


def minute_of(now: float) -> datetime:
    """Return the start of the minute of a Unix time."""
    return datetime.fromtimestamp(now // MINUTE_S * MINUTE_S, UTC)


async def write_minute(
    connection: AsyncConnection, minute: datetime, pools: Iterable[PoolMinute]
) -> None:
    """Store the numbers of pools. The first numbers of a minute are kept."""
    rows = [
        {"minute": minute, "pool_id": it.pool_id, **{name: getattr(it, name) for name in NUMBERS}}
        for it in sorted(pools, key=lambda it: it.pool_id)
    ]
    if rows:
        await connection.execute(insert(scaling_minutes).on_conflict_do_nothing(), rows)


async def read_minutes(
    connection: AsyncConnection, pool_id: str, span: tuple[datetime, datetime]
) -> dict[str, list[float | None]]:
    """Return the numbers of all minutes of a time range, with None for a minute without a row."""
    begin, end = span
    t = scaling_minutes.c
    query = select(t.minute, *(t[name] for name in NUMBERS)).where(
        t.pool_id == pool_id, t.minute >= begin, t.minute < end
    )
    count = -(-(end - begin) // timedelta(seconds=MINUTE_S))
    found: dict[str, list[float | None]] = {name: [None] * count for name in NUMBERS}
    for minute, *values in await connection.execute(query):
        at = (minute - begin) // timedelta(seconds=MINUTE_S)
        for name, value in zip(NUMBERS, values, strict=True):
            found[name][at] = value
    return found


async def forget_minutes(connection: AsyncConnection) -> None:
    """Delete the rows that are older than the kept days."""
    old = scaling_minutes.c.minute < func.now() - timedelta(days=KEPT_DAYS)
    await connection.execute(delete(scaling_minutes).where(old))
