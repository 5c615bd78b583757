"""Reads and prunes the intervals of replicas. Triggers in PostgreSQL write the intervals."""

from datetime import timedelta

from sqlalchemy import delete, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.fleet.hours import Edges, ReplicaCounts
from control_plane.fleet.hours_tables import replica_intervals

_PRUNED_MAX = 10_000  # Largest number of rows per deletion. One deletion lasts about 100 ms.
# Times are integer microseconds, so the parts of an interval add up exactly. `t` is the Unix time
# of an edge.
_COUNTS = {
    "running": "CASE WHEN is_running THEN 1 ELSE 0 END",
    "reserved": "CASE WHEN is_running THEN 0 ELSE 1 END",
    "accelerators": "accelerators",
    "unassigned": "CASE WHEN accelerators = 0 THEN 1 ELSE 0 END",
}
_EDGES = """
WITH asked AS (
    SELECT CAST(:begin AS bigint) AS span_us, CAST(:end AS bigint) AS until_us,
        CAST(:width AS bigint) AS width_us
), spans AS (
    SELECT {group} AS name, is_running, i.accelerators,
        greatest((extract(epoch FROM began_at) * 1000000)::bigint, span_us) AS begin_us,
        least((extract(epoch FROM coalesce(ended_at, seen_at)) * 1000000)::bigint, until_us)
            AS end_us
    FROM asked, replica_intervals i LEFT JOIN nodes ON nodes.id = i.node_id
    WHERE began_at < to_timestamp(until_us / 1000000.0)
        AND (ended_at > to_timestamp(span_us / 1000000.0) OR ended_at IS NULL)
), edges AS (
    SELECT name, is_running, accelerators, begin_us AS t, 1 AS sign FROM spans
    WHERE end_us > begin_us
    UNION ALL
    SELECT name, is_running, accelerators, end_us, -1 FROM spans, asked
    WHERE end_us > begin_us AND end_us < until_us
), placed AS (
    SELECT edges.*, greatest(span_us, t / width_us * width_us) AS bucket,
        least(until_us, (t / width_us + 1) * width_us) AS bucket_end
    FROM edges, asked
)
SELECT name, bucket, {changes}, {insides} FROM placed GROUP BY name, bucket
"""


async def edges(
    connection: AsyncConnection, group: str, span_us: tuple[int, int], width_us: int
) -> list[Edges]:
    """Return the starts and ends of intervals by group and bucket.

    Args:
        connection: Connection of a transaction.
        group: Column to group by, `pool_id` or `node_id`.
        span_us: Start and end of the time range, in Unix microseconds.
        width_us: Width of a bucket in microseconds. Buckets begin at multiples of the width. The
            first bucket begins with the time range.
    """
    assert group in ("pool_id", "node_id")
    changes = ", ".join(f"sum(sign * ({count}))::bigint" for count in _COUNTS.values())
    insides = ", ".join(
        f"sum(sign * ({count}) * (bucket_end - t))::bigint" for count in _COUNTS.values()
    )
    query = text(_EDGES.format(group=group, changes=changes, insides=insides))
    given = {"begin": span_us[0], "end": span_us[1], "width": width_us}
    return [
        Edges(name, bucket, ReplicaCounts(*counts[:4]), ReplicaCounts(*counts[4:]))
        for name, bucket, *counts in await connection.execute(query, given)
    ]


async def prune_intervals(connection: AsyncConnection, *, kept_days: int) -> None:
    """Delete a limited number of the intervals that ended more than `kept_days` ago."""
    t = replica_intervals.c
    old = select(t.id).where(t.ended_at < func.now() - timedelta(days=kept_days))
    await connection.execute(delete(replica_intervals).where(t.id.in_(old.limit(_PRUNED_MAX))))
