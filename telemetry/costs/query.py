"""Reads the busy time of pools and the work of requests from the trace store."""

from collections.abc import Mapping, Sequence
from typing import Any

from clickhouse_connect.driver.exceptions import DatabaseError

from sluice.errors import BadRequestError, ErrorCode
from telemetry import params
from telemetry.costs.model import Busy, Work
from telemetry.costs.report import CostQuery, Measured
from telemetry.store import Store

ROWS_MAX = 100_000
RANGE_MS_MAX = 100 * 86_400_000
VOLUME_MAX = 10**15
_DEFAULT_MS = 86_400_000
_TOO_MANY_ROWS = 396
_BY = ("pool", "model", "tenant", "hour")

# A request occupies its replica from the end of its queueing until its own end. If it spans several
# hours, it counts in each by its share of time there. Durations in an event are at most 72
# minutes, because they are 32-bit microseconds. FINAL returns one row per event.
SPANS = """
    SELECT *, greatest(0, least(end_ms, (bucket + 1) * 3600000, {to_ms:Int64})
            - greatest(begin_ms, bucket * 3600000, {from_ms:Int64})) AS inside_ms,
        inside_ms / (end_ms - begin_ms) AS share
    FROM (
        SELECT pool_id, replica_id, tenant_id, model, is_copy,
            greatest(0, toInt64(prompt_tokens) - toInt64(cached_tokens)) AS uncached,
            toInt64(cached_tokens) AS cached, toInt64(output_tokens) AS output,
            output_tokens * (prompt_tokens + output_tokens / 2 / greatest(1, choices)) AS attended,
            toUnixTimestamp64Milli(received_at) AS received_ms,
            received_ms + intDiv(toInt64(gateway_us) + queue_us + engine_queue_us, 1000)
                AS begin_ms,
            greatest(begin_ms + 1, received_ms + intDiv(total_us, 1000)) AS end_ms,
            arrayJoin(range(toUInt64(intDiv(begin_ms, 3600000)),
                toUInt64(intDiv(end_ms - 1, 3600000) + 1))) AS hour,
            toInt64(hour) AS bucket
        FROM requests FINAL
        WHERE replica_id != '' AND pool_id != ''
            AND received_at >= fromUnixTimestamp64Milli({from_ms:Int64} - 7200000, 'UTC')
            AND received_at < fromUnixTimestamp64Milli({to_ms:Int64}, 'UTC')
    )
    WHERE inside_ms > 0
"""
LIMITS = f"""
SETTINGS max_execution_time = 25, do_not_merge_across_partitions_select_final = 1,
    max_result_rows = {ROWS_MAX}, result_overflow_mode = 'throw'
"""
# The share of a request that belongs to one hour.
PARTS = """sum(share) AS requests, sum(uncached * share) AS uncached_tokens,
    sum(cached * share) AS cached_tokens, sum(output * share) AS output_tokens,
    sum(attended * share) AS attended_tokens"""
_WORK = f"""
SELECT bucket * 3600000 AS start_ms, pool_id, tenant_id, model, is_copy, {PARTS}
FROM ({SPANS})
GROUP BY start_ms, pool_id, tenant_id, model, is_copy
ORDER BY start_ms, pool_id, tenant_id, model, is_copy
{LIMITS}
"""  # noqa: S608 - constants of the code, with values as parameters
_BUSY = f"""
SELECT start_ms, pool_id, sum(replica_ms) / 1000 AS busy_s, sum(sum_ms) / 1000 AS request_s
FROM (
    SELECT bucket * 3600000 AS start_ms, pool_id, sum(inside_ms) AS sum_ms,
        intervalLengthSum(greatest(begin_ms, bucket * 3600000, {{from_ms:Int64}}),
            least(end_ms, (bucket + 1) * 3600000, {{to_ms:Int64}})) AS replica_ms
    FROM ({SPANS})
    GROUP BY start_ms, pool_id, replica_id
)
GROUP BY start_ms, pool_id
ORDER BY start_ms, pool_id
{LIMITS}
"""  # noqa: S608 - constants of the code, with values as parameters


def cost_query(query: params.Query, now_ms: int) -> CostQuery:
    """Return the query in a request's parameters. The default is the last day by model.

    Raises:
        BadRequestError: A parameter is invalid, or the time range is longer than 100 days.
    """
    # The range ends now at the latest, because later times have no events.
    to_ms = min(now_ms, params.moment_ms(query, "to", default_ms=now_ms))
    from_ms = params.moment_ms(query, "from", default_ms=max(0, to_ms - _DEFAULT_MS))
    if not 0 < to_ms - from_ms <= RANGE_MS_MAX:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST, "from must be before to, at most 100 days", param="from"
        )
    return CostQuery(
        (from_ms, to_ms),
        params.choice(query, "by", _BY, default="model"),
        params.ident(query, "tenant"),
        params.choice(query, "spread_idle", ("false", "true"), default="false") == "true",
        params.number(query, "utilisation_percent", 0, 100, default=0) / 100,
        params.number(query, "volume_tokens", 0, VOLUME_MAX - 1, default=0),
    )


async def measured(store: Store, span_ms: tuple[int, int]) -> Measured:
    """Return the busy times and the work of a time range.

    Raises:
        BadRequestError: The result has more than `ROWS_MAX` rows.
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    span = {"from_ms": span_ms[0], "to_ms": span_ms[1]}
    busy, works = await with_bounded_rows(store, (_BUSY, _WORK), span)
    return Measured([Busy(**row) for row in busy], [Work(**row) for row in works])


async def with_bounded_rows(
    store: Store, queries: Sequence[str], parameters: Mapping[str, Any]
) -> list[list[dict[str, Any]]]:
    """Return the rows of each query.

    Raises:
        BadRequestError: A result has more than `ROWS_MAX` rows.
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    try:
        return [await store.query(query, parameters) for query in queries]
    except DatabaseError as error:
        if error.code == _TOO_MANY_ROWS:
            message = f"more than {ROWS_MAX} rows of hours, tenants and models: ask for less time"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="from") from error
        raise
