"""Computes the ledger from request events: the usage by tenant, key, model and hour.

Each accepted request has exactly one event, however it ended, so usage is the sum of the events.
Each query computes usage again. So after a late event, the next answer includes the event, and
reports that the sum was corrected. `telemetry.rollups` decides which parts are read from sums.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from clickhouse_connect.driver.exceptions import DatabaseError

from sluice.errors import BadRequestError, ErrorCode
from telemetry import params
from telemetry.queries import TenantScope
from telemetry.rollups import CLOSED_AFTER_MS, MEASURES
from telemetry.rollups_worker import summed
from telemetry.store import Store

ROWS_MAX = 100_000
RANGE_MS_MAX = 400 * 86_400_000
_TOO_MANY_ROWS = 396
_ISO = "formatDateTime({}, '%Y-%m-%dT%H:%i:%SZ')"

# Copies for shadow stages are excluded, because no tenant requested them.
_USAGE = """
SELECT
    {start} AS start,
    tenant_id,
    key_id,
    model,
    sum(requests) AS requests,
    sum(failed) AS failed_requests,
    sum(prompt) AS prompt_tokens,
    sum(cached) AS cached_tokens,
    sum(output) AS output_tokens,
    sum(withheld) AS withheld_tokens,
    sum(unbilled) AS unbilled_tokens,
    sum(late) AS late_requests,
    if(late_requests > 0, {corrected}, '') AS corrected_at
FROM (
    SELECT toStartOfInterval(at, toIntervalMillisecond({{bucket_ms:Int64}})) AS bucket,
        tenant_id, key_id, model, {measures}
    FROM ({rows})
    WHERE NOT is_copy AND ({{key:String}} = '' OR key_id = {{key:String}})
        AND ({{model:String}} = '' OR model = {{model:String}})
) AS summed
GROUP BY bucket, tenant_id, key_id, model
HAVING sum(summed.requests) > 0
ORDER BY bucket, tenant_id, key_id, model
SETTINGS max_execution_time = 25, do_not_merge_across_partitions_select_final = 1,
    max_result_rows = {rows_max}, result_overflow_mode = 'throw'
"""


class Granularity(StrEnum):
    """The interval of one row, in UTC."""

    HOUR = "hour"
    DAY = "day"

    @property
    def ms(self) -> int:
        """The length of the interval in milliseconds."""
        return 3_600_000 if self is Granularity.HOUR else 86_400_000


_DEFAULT_MS = {Granularity.HOUR: 86_400_000, Granularity.DAY: 30 * 86_400_000}


class Export(StrEnum):
    """The format of an exported file, by ClickHouse's name."""

    CSV = "CSVWithNames"
    PARQUET = "Parquet"


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A query for usage. An empty id means all ids.

    Attributes:
        from_ms: Unix time in ms. The first row is the hour or day that contains this time.
        to_ms: Unix time in ms. The last row is the hour or day that contains or ends at this time.
    """

    from_ms: int
    to_ms: int
    granularity: Granularity = Granularity.HOUR
    tenant_id: str = ""
    key_id: str = ""
    model: str = ""

    @property
    def span_ms(self) -> tuple[int, int]:
        """The queried time range in Unix milliseconds, extended to whole hours or days."""
        length = self.granularity.ms
        return self.from_ms // length * length, -(-self.to_ms // length) * length

    @property
    def scope(self) -> TenantScope:
        """The tenants whose rows are read."""
        return TenantScope.asked(self.tenant_id)

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of the query's parameters."""
        return {
            "bucket_ms": self.granularity.ms,
            "key": self.key_id,
            "model": self.model,
            **self.scope.parameters,
        }


def usage_query(query: params.Query, now_ms: int) -> UsageQuery:
    """Return the query in a request's parameters.

    The default range is the last day for rows by hour, and the last 30 days for rows by day.

    Raises:
        BadRequestError: A parameter is invalid, or the time range is longer than 400 days.
    """
    words = tuple(Granularity)
    granularity = Granularity(params.choice(query, "granularity", words, default="hour"))
    to_ms = params.moment_ms(query, "to", default_ms=now_ms)
    default_ms = max(0, to_ms - _DEFAULT_MS[granularity])
    from_ms = params.moment_ms(query, "from", default_ms=default_ms)
    if not 0 < to_ms - from_ms <= RANGE_MS_MAX:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST, "from must be before to, at most 400 days", param="from"
        )
    return UsageQuery(
        from_ms,
        to_ms,
        granularity,
        tenant_id=params.ident(query, "tenant"),
        key_id=params.ident(query, "key"),
        model=params.ident(query, "model"),
    )


def closed_until_ms(ingested_until_ms: int) -> int:
    """Return the end of the last closed hour. Events of closed hours count as late.

    Args:
        ingested_until_ms: Unix time in ms up to which events were ingested, or 0 if unknown.

    Returns:
        Unix time in ms, or 0 if the progress of ingestion is unknown.
    """
    hour_ms = Granularity.HOUR.ms
    return max(0, ingested_until_ms - CLOSED_AFTER_MS) // hour_ms * hour_ms


async def usage(store: Store, query: UsageQuery) -> list[dict[str, Any]]:
    """Return a row per hour or day, tenant, key and model, with times as ISO 8601 text.

    Raises:
        BadRequestError: The result has more than `ROWS_MAX` rows.
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    try:
        return await store.query(await _sql(store, query), query.parameters)
    except DatabaseError as error:
        raise _explained(error) from error


async def exported_usage(store: Store, query: UsageQuery, export: Export) -> bytes:
    """Return usage as a file. Raises the errors of `usage`.

    In Parquet, the start of an interval is a timestamp instead of text.
    """
    try:
        sql = await _sql(store, query, is_typed=export is Export.PARQUET)
        return await store.raw(sql, query.parameters, export)
    except DatabaseError as error:
        raise _explained(error) from error


async def _sql(store: Store, query: UsageQuery, *, is_typed: bool = False) -> str:
    """Return the SQL of a query. It depends on the present progress, so it must not be cached."""
    return _USAGE.format(
        start="bucket" if is_typed else _ISO.format("bucket"),
        corrected=_ISO.format("max(late_at)"),
        measures=", ".join(MEASURES),
        rows=await summed(store, query.span_ms, query.scope),
        rows_max=ROWS_MAX,
    )


def _explained(error: DatabaseError) -> Exception:
    if error.code == _TOO_MANY_ROWS:
        message = f"more than {ROWS_MAX} rows: ask for less time, one tenant, or days"
        return BadRequestError(ErrorCode.INVALID_REQUEST, message, param="from")
    return error
