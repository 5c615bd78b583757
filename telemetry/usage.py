"""The ledger: usage by tenant, key, model and hour, from the events of requests.

There is one event per accepted request, however it ended, so their sum is the usage. It is computed
for each query: a late event is in the next answer, which also says so. `telemetry.rollups` knows
the parts that are already summed.
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

# Copies for shadow stages are no tenant's use.
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
    """The interval of one row; in UTC."""

    HOUR = "hour"
    DAY = "day"

    @property
    def ms(self) -> int:
        """The length of the interval in milliseconds."""
        return 3_600_000 if self is Granularity.HOUR else 86_400_000


_DEFAULT_MS = {Granularity.HOUR: 86_400_000, Granularity.DAY: 30 * 86_400_000}


class Export(StrEnum):
    """The format of a file, as ClickHouse names it."""

    CSV = "CSVWithNames"
    PARQUET = "Parquet"


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A query for usage; an empty id stands for all ids.

    Attributes:
        from_ms: Unix time; the hour or day that it lies in is the first.
        to_ms: Unix time; the hour or day that it lies in is the last, unless it is its begin.
    """

    from_ms: int
    to_ms: int
    granularity: Granularity = Granularity.HOUR
    tenant_id: str = ""
    key_id: str = ""
    model: str = ""

    @property
    def span_ms(self) -> tuple[int, int]:
        """The span in whole hours or days, in Unix time."""
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
    """Return the query of a request's parameters; by default a day by hour, or 30 days by day.

    Raises:
        BadRequestError: A parameter is invalid, or the span is longer than 400 days.
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
    """Return the end of the last closed hour: later events for it count as late.

    0: the progress of ingestion is unknown.
    """
    hour_ms = Granularity.HOUR.ms
    return max(0, ingested_until_ms - CLOSED_AFTER_MS) // hour_ms * hour_ms


async def usage(store: Store, query: UsageQuery) -> list[dict[str, Any]]:
    """Return a row per hour or day, tenant, key and used model; times in ISO 8601.

    Raises:
        BadRequestError: More than `ROWS_MAX` rows.
        STORE_ERRORS: ClickHouse is away.
    """
    try:
        return await store.query(await _sql(store, query), query.parameters)
    except DatabaseError as error:
        raise _explained(error) from error


async def exported_usage(store: Store, query: UsageQuery, export: Export) -> bytes:
    """Return usage as a file; in Parquet the start is a timestamp. Raises the errors of `usage`."""
    try:
        sql = await _sql(store, query, is_typed=export is Export.PARQUET)
        return await store.raw(sql, query.parameters, export)
    except DatabaseError as error:
        raise _explained(error) from error


async def _sql(store: Store, query: UsageQuery, *, is_typed: bool = False) -> str:
    """Return the query, which is valid for now: do not keep it."""
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
