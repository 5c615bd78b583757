"""Reads costs of whole hours from precomputed sums, for web pages.

`telemetry.day_sums` computes these sums for whole days, from all events of the day. So they are as
old as its last round. `telemetry.costs.query` reads single events instead, and its result is always
up to date.
"""

from typing import Any

from telemetry import params
from telemetry.costs.model import HOUR_MS, Busy, Work
from telemetry.costs.query import LIMITS, PARTS, SPANS, measured, with_bounded_rows
from telemetry.costs.report import CostQuery, Measured
from telemetry.day_sums import DayStatements
from telemetry.rollup_progress import progress
from telemetry.rollups import DAY_MS
from telemetry.store import Store

_NAME = "cost_hours"
_MEASURES = ("requests", "uncached_tokens", "cached_tokens", "output_tokens", "attended_tokens")
_OF_DAY = SPANS.replace("{from_ms:Int64}", "{day_ms:Int64}").replace(
    "{to_ms:Int64}", f"({{day_ms:Int64}} + {DAY_MS})"
)
_NOW = "fromUnixTimestamp64Milli({now_ms:Int64}, 'UTC')"
_MADE = "SETTINGS max_execution_time = 60, do_not_merge_across_partitions_select_final = 1"
_WORK = f"""
INSERT INTO work_hours (start, kind, pool_id, name, is_copy, {", ".join(_MEASURES)}, version)
SELECT toDateTime(bucket * 3600, 'UTC') AS start, payer.1 AS kind, pool_id, payer.2 AS name,
    is_copy, {PARTS}, {_NOW}
FROM (
    SELECT *, arrayJoin([('model', toString(model)), ('tenant', toString(tenant_id))]) AS payer
    FROM ({_OF_DAY})
)
GROUP BY start, kind, pool_id, name, is_copy
{_MADE}
"""  # noqa: S608 - constants of the code, with values as parameters
_BUSY = f"""
INSERT INTO busy_hours (start, pool_id, busy_s, request_s, version)
SELECT start, pool_id, sum(replica_ms) / 1000, sum(sum_ms) / 1000, {_NOW}
FROM (
    SELECT toDateTime(bucket * 3600, 'UTC') AS start, pool_id, sum(inside_ms) AS sum_ms,
        intervalLengthSum(greatest(begin_ms, bucket * {HOUR_MS}),
            least(end_ms, (bucket + 1) * {HOUR_MS})) AS replica_ms
    FROM ({_OF_DAY})
    GROUP BY start, pool_id, replica_id
)
GROUP BY start, pool_id
{_MADE}
"""  # noqa: S608 - as above
COST_SUMS = DayStatements(_NAME, (_WORK, _BUSY), reach_minutes=120)

_SPAN = """start >= fromUnixTimestamp64Milli({from_ms:Int64}, 'UTC')
    AND start < fromUnixTimestamp64Milli({to_ms:Int64}, 'UTC')"""
_SUMMED_WORK = f"""
SELECT toInt64(toUnixTimestamp(start)) * 1000 AS start_ms, pool_id,
    if({{by:String}} = 'tenant', name, '') AS tenant_id,
    if({{by:String}} = 'model', name, '') AS model, is_copy,
    {", ".join(f"sum(summed.{it}) AS {it}" for it in _MEASURES)}
FROM work_hours AS summed FINAL
WHERE kind = if({{by:String}} = 'tenant', 'tenant', 'model') AND {_SPAN}
GROUP BY start_ms, pool_id, tenant_id, model, is_copy
ORDER BY start_ms, pool_id, tenant_id, model, is_copy
{LIMITS}
"""  # noqa: S608 - as above
_SUMMED_BUSY = f"""
SELECT toInt64(toUnixTimestamp(start)) * 1000 AS start_ms, pool_id, busy_s, request_s
FROM busy_hours FINAL
WHERE {_SPAN}
ORDER BY start_ms, pool_id
{LIMITS}
"""  # noqa: S608 - as above


async def summed(store: Store, query: CostQuery) -> tuple[Measured, tuple[int, int], str]:
    """Return the work of whole hours, their time range in Unix ms, and when it was summed.

    The time range ends with the last hour that has sums. If no hour of the query has sums, the work
    is read from events.

    Raises:
        BadRequestError: The result has more than 100,000 rows.
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    known = await progress(store)
    made_ms = known.made_ms(_NAME)
    from_ms, to_ms = (it // HOUR_MS * HOUR_MS for it in query.span_ms)
    to_ms = min(to_ms, (made_ms or 0) // HOUR_MS * HOUR_MS)
    if made_ms is None or to_ms <= from_ms:
        return await measured(store, query.span_ms), query.span_ms, params.iso(known.now_ms)
    asked: dict[str, Any] = {"from_ms": from_ms, "to_ms": to_ms, "by": query.by}
    busy, works = await with_bounded_rows(store, (_SUMMED_BUSY, _SUMMED_WORK), asked)
    found = Measured([Busy(**row) for row in busy], [Work(**row) for row in works])
    return found, (from_ms, to_ms), params.iso(made_ms)
