"""Sums the requests of one pool per bucket of time, for replays and charts of scaling.

The answer has sums only, so nothing in it belongs to a tenant. Its size depends on the time range
and not on the number of requests.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sluice.errors import BadRequestError, ErrorCode
from telemetry import params
from telemetry.store import Store

RANGE_MS_MAX = 48 * 3_600_000 + 60_000  # 48 hours, extended to whole minutes
_TIERS_MAX = 100
_OBJECTIVE_MS_MAX = 86_400_000
_SUMS = ("requests", "prompt_tokens", "output_tokens", "judged", "late")

# Shadow copies are included, because they are work of the pool, but no one waits for them. The
# tokens of a cached prefix are no work. A first token is late as in `slo_minutes`, with the tier's
# objective. FINAL counts an event once that was inserted twice.
_DEMAND = """
SELECT
    intDiv(toUnixTimestamp64Milli(received_at) - {from_ms:Int64}, {step_ms:Int64}) AS bucket,
    count() AS requests,
    sum(prompt_tokens - least(cached_tokens, prompt_tokens)) AS prompt_tokens,
    sum(output_tokens) AS output_tokens,
    countIf(is_judged) AS judged,
    countIf(is_judged AND (status >= 500 OR first_us > objective_us)) AS late
FROM (
    SELECT received_at, prompt_tokens, cached_tokens, output_tokens, status,
        {objectives_us:Array(UInt64)}[indexOf({tiers:Array(String)}, tier_id)] AS objective_us,
        objective_us > 0 AND NOT is_copy AND (status < 400 OR status >= 500)
            AND endpoint != '/v1/embeddings' AS is_judged,
        if(is_stream, toUInt64(ttft_us),
            toUInt64(gateway_us) + queue_us + engine_queue_us + prefill_us) AS first_us
    FROM requests FINAL
    WHERE pool_id = {pool:String}
        AND received_at >= fromUnixTimestamp64Milli({from_ms:Int64}, 'UTC')
        AND received_at < fromUnixTimestamp64Milli({to_ms:Int64}, 'UTC')
)
GROUP BY bucket
ORDER BY bucket
SETTINGS max_execution_time = 20, do_not_merge_across_partitions_select_final = 1
"""


@dataclass(frozen=True, slots=True)
class DemandQuery:
    """A query for the demand on one pool.

    Attributes:
        pool_id: Id of the pool.
        from_ms: Start of the time range in Unix milliseconds.
        to_ms: End of the time range in Unix milliseconds, exclusive.
        step_ms: Length of a bucket in milliseconds.
        objectives_ms: TTFT objectives by tier. Requests of other tiers are not judged.
    """

    pool_id: str
    from_ms: int
    to_ms: int
    step_ms: int
    objectives_ms: Mapping[str, int]

    @property
    def buckets(self) -> int:
        """The number of buckets in the time range. The last one may be shorter."""
        return -(-(self.to_ms - self.from_ms) // self.step_ms)


def demand_query(pool: Mapping[str, str], query: params.Query) -> DemandQuery:
    """Return the query in a request's path and parameters.

    Raises:
        BadRequestError: A parameter is invalid, or the time range is longer than 48 hours.
    """
    from_ms, to_ms = (params.moment_ms(query, name, default_ms=0) for name in ("from", "to"))
    if not 0 < to_ms - from_ms <= RANGE_MS_MAX:
        message = "from must be before to, at most 48 hours"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="from")
    return DemandQuery(
        params.required(pool, "pool_id"),
        from_ms,
        to_ms,
        1000 * params.number(query, "step_s", 15, 900, default=15),
        _objectives(query.get("objectives", "{}")),
    )


def _objectives(text: str) -> dict[str, int]:
    try:
        found = json.loads(text)
        is_right = len(found) <= _TIERS_MAX and all(
            isinstance(value, int) and 0 < value <= _OBJECTIVE_MS_MAX for value in found.values()
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_right, found = False, {}
    if not is_right:
        message = 'objectives must be JSON of milliseconds by tier, as {"gold": 1500}'
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="objectives")
    return dict(found)


async def pool_demand(store: Store, query: DemandQuery) -> dict[str, list[int]]:
    """Return the sums of all buckets in order, one list for each sum.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached, or takes longer than 20 s.
    """
    rows = await store.query(
        _DEMAND,
        {
            "pool": query.pool_id,
            "from_ms": query.from_ms,
            "to_ms": query.to_ms,
            "step_ms": query.step_ms,
            "tiers": list(query.objectives_ms),
            "objectives_us": [1000 * value for value in query.objectives_ms.values()],
        },
    )
    found = {name: [0] * query.buckets for name in _SUMS}
    for row in rows:
        for name, sums in found.items():
            sums[row["bucket"]] = row[name]
    return found
