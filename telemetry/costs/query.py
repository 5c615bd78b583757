"""What requests were to the fleet, from the trace store, and what that cost."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clickhouse_connect.driver.exceptions import DatabaseError

from sluice.errors import BadRequestError, ErrorCode
from telemetry import params
from telemetry.costs.breakeven import at_volume, break_even
from telemetry.costs.model import Busy, Costs, Line, PoolCost, Work, costs, spread_idle
from telemetry.costs.prices import MICRO, Prices
from telemetry.store import Store

ROWS_MAX = 100_000
RANGE_MS_MAX = 100 * 86_400_000
VOLUME_MAX = 10**15
_DEFAULT_MS = 86_400_000
_TOO_MANY_ROWS = 396
_BY = ("pool", "model", "tenant", "hour")

# A request is on its replica from the end of its queue to its end, and counts in each hour by its
# time there; the longest that an event can tell of is 72 minutes. FINAL: one row per event.
_SPANS = """
    SELECT *, greatest(0, least(end_ms, (bucket + 1) * 3600000, {to_ms:Int64})
            - greatest(begin_ms, bucket * 3600000, {from_ms:Int64})) AS inside_ms,
        inside_ms / (end_ms - begin_ms) AS share
    FROM (
        SELECT pool_id, replica_id, tenant_id, model, is_copy,
            greatest(0, toInt64(prompt_tokens) - toInt64(cached_tokens)) AS uncached,
            toInt64(cached_tokens) AS cached, toInt64(output_tokens) AS output,
            output_tokens * (prompt_tokens + output_tokens / 2) AS attended,
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
_LIMITS = f"""
SETTINGS max_execution_time = 25, do_not_merge_across_partitions_select_final = 1,
    max_result_rows = {ROWS_MAX}, result_overflow_mode = 'throw'
"""
_WORK = f"""
SELECT bucket * 3600000 AS start_ms, pool_id, tenant_id, model, is_copy, sum(share) AS requests,
    sum(uncached * share) AS uncached_tokens, sum(cached * share) AS cached_tokens,
    sum(output * share) AS output_tokens, sum(attended * share) AS attended_tokens
FROM ({_SPANS})
GROUP BY start_ms, pool_id, tenant_id, model, is_copy
ORDER BY start_ms, pool_id, tenant_id, model, is_copy
{_LIMITS}
"""  # noqa: S608 - constants of the code; values are parameters
_BUSY = f"""
SELECT start_ms, pool_id, sum(replica_ms) / 1000 AS busy_s, sum(sum_ms) / 1000 AS request_s
FROM (
    SELECT bucket * 3600000 AS start_ms, pool_id, sum(inside_ms) AS sum_ms,
        intervalLengthSum(greatest(begin_ms, bucket * 3600000, {{from_ms:Int64}}),
            least(end_ms, (bucket + 1) * 3600000, {{to_ms:Int64}})) AS replica_ms
    FROM ({_SPANS})
    GROUP BY start_ms, pool_id, replica_id
)
GROUP BY start_ms, pool_id
ORDER BY start_ms, pool_id
{_LIMITS}
"""  # noqa: S608 - constants of the code; values are parameters


@dataclass(frozen=True, slots=True)
class CostQuery:
    """What is asked for.

    Attributes:
        span_ms: Unix times, not rounded.
        by: One of `pool`, `model`, `tenant`, `hour`.
        tenant_id: Only its share, and nothing of the fleet; empty: all.
        is_idle_spread: Give idle cost to who used the pool.
        utilisation: Of paid time, for break-even; 0: as it was.
        volume_tokens: Per month, to compare both bills at; 0: none.
        paid_hours: Accelerator-hours by pool, instead of the price list's.
    """

    span_ms: tuple[int, int]
    by: str = "model"
    tenant_id: str = ""
    is_idle_spread: bool = False
    utilisation: float = 0.0
    volume_tokens: int = 0
    paid_hours: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What requests were to the fleet, without prices."""

    busy: Sequence[Busy]
    works: Sequence[Work]

    def as_json(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        return {
            "busy": [asdict(it) for it in self.busy],
            "work": [asdict(it) for it in self.works],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Measured":
        """Return what `as_json` made."""
        return cls([Busy(**it) for it in found["busy"]], [Work(**it) for it in found["work"]])


def cost_query(query: params.Query, now_ms: int) -> CostQuery:
    """Return what the parameters of a request ask for: by default the last day by model.

    Raises:
        BadRequestError: One of them says nothing, or the time is longer than 100 days.
    """
    to_ms = min(now_ms, params.moment_ms(query, "to", default_ms=now_ms))  # nothing is known beyond
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
    """Return busy times and work of a span.

    Raises:
        BadRequestError: More than `ROWS_MAX` rows.
        STORE_ERRORS: ClickHouse is away.
    """
    span = {"from_ms": span_ms[0], "to_ms": span_ms[1]}
    try:
        busy = await store.query(_BUSY, span)
        works = await store.query(_WORK, span)
    except DatabaseError as error:
        if error.code == _TOO_MANY_ROWS:
            message = f"more than {ROWS_MAX} rows of hours, tenants and models: ask for less time"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="from") from error
        raise
    return Measured([Busy(**row) for row in busy], [Work(**row) for row in works])


def answer(prices: Prices, found: Measured, query: CostQuery) -> dict[str, Any]:
    """Return what `GET /v1/costs` says; pure."""
    all_costs = costs(prices, found.busy, found.works, query.span_ms, query.paid_hours)
    lines = spread_idle(all_costs.lines) if query.is_idle_spread else all_costs.lines
    told: dict[str, Any] = {
        "from": params.iso(query.span_ms[0]),
        "to": params.iso(query.span_ms[1]),
        "by": query.by,
        "currency": prices.currency,
    }
    if query.tenant_id:
        its_lines = [
            line
            for line in lines
            if line.work.tenant_id == query.tenant_id and not line.is_idle and not line.work.is_copy
        ]
        return told | _table(its_lines, query.by)
    return told | {
        **_table(lines, query.by),
        "pools": [_pool_json(pool) for pool in all_costs.pools],
        "unpriced_requests": {
            name: round(it, 3) for name, it in all_costs.unpriced_requests.items()
        },
        "break_even": _break_even(prices, all_costs, query),
    }


_NAMES: Mapping[str, Callable[[Line], str]] = {
    "pool": lambda line: line.work.pool_id,
    "model": lambda line: line.work.model,
    "tenant": lambda line: line.work.tenant_id,
    "hour": lambda line: params.iso(line.work.start_ms),
}


def _table(lines: Iterable[Line], by: str) -> dict[str, Any]:
    """Return rows of who used what, and beside them what is nobody's; they add up to the total."""
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        kind = "idle" if line.is_idle else "copies" if line.work.is_copy else "use"
        name = _NAMES[by](line) if kind == "use" or by in ("pool", "hour") else ""
        groups[name, kind].append(line)
    rows = [_row(name, kind, its_lines) for (name, kind), its_lines in groups.items()]
    rows = [row for row in rows if row["cost_micros"] or row["kind"] == "use"]
    order = {"use": 0, "copies": 1, "idle": 2}
    if by in ("pool", "hour"):
        rows.sort(key=lambda row: (row["name"], order[row["kind"]]))
    else:
        rows.sort(key=lambda row: (order[row["kind"]], -row["cost_micros"], row["name"]))
    return {"data": rows, "total_micros": sum(row["cost_micros"] for row in rows)}


def _row(name: str, kind: str, lines: Sequence[Line]) -> dict[str, Any]:
    works = [line.work for line in lines]
    uncached, cached, output = _tokens(works)
    micros, tokens = sum(line.micros for line in lines), uncached + cached + output
    return {
        "name": name,
        "kind": kind,
        "requests": round(sum(work.requests for work in works), 3),
        "prompt_tokens": round(uncached + cached),
        "cached_tokens": round(cached),
        "output_tokens": round(output),
        "cost_micros": micros,
        "cost_per_million": _per_million(micros, tokens),
        "cost_per_million_output": _per_million(micros, output),
    }


def _pool_json(pool: PoolCost) -> dict[str, Any]:
    return {
        "pool_id": pool.pool_id,
        "paid_hours": pool.paid_hours,
        "busy_hours": pool.busy_hours,
        "least_hours": pool.least_hours,
        "busy_share": _share(pool.busy_hours, pool.paid_hours),
        "bound_share": _share(pool.least_hours, pool.busy_hours),
        "batch": pool.batch,
        "cost_micros": pool.micros,
        "idle_micros": pool.idle_micros,
        "cost_per_million": _per_million(pool.micros, pool.tokens),
    }


def _break_even(prices: Prices, found: Costs, query: CostQuery) -> list[dict[str, Any]]:
    """Compare each pool that was used with each API, as busy as it was and as it may be."""
    told: list[dict[str, Any]] = []
    for pool in found.pools:
        works = [it.work for it in found.lines if it.work.pool_id == pool.pool_id]
        uncached, cached, output = _tokens(work for work in works if not work.is_copy)
        if pool.tokens <= 0 or pool.busy_hours <= 0 or pool.paid_hours <= 0:
            continue
        size = prices.pools[pool.pool_id].accelerators_per_replica
        replica_hour = float(prices.accelerator_of(pool.pool_id).price_per_hour) * size
        served = pool.tokens / pool.busy_hours * size
        now = min(1.0, pool.busy_hours / pool.paid_hours)
        for name, api in prices.apis.items():
            per_million = api.cost_micros(uncached, cached, output) / pool.tokens
            for share in dict.fromkeys((now, query.utilisation or now)):
                even = break_even(served, share, replica_hour, per_million)
                row = {"pool_id": pool.pool_id, "api": name, **asdict(even)}
                if query.volume_tokens:
                    both = at_volume(even, query.volume_tokens)
                    row["at_volume"] = asdict(both) | {"is_own_cheaper": both.is_own_cheaper}
                told.append(row)
    return told


def _tokens(works: Iterable[Work]) -> tuple[float, float, float]:
    kept = list(works)
    return (
        sum(work.uncached_tokens for work in kept),
        sum(work.cached_tokens for work in kept),
        sum(work.output_tokens for work in kept),
    )


def _per_million(micros: int, tokens: float) -> float | None:
    return round(micros / MICRO / tokens * 1e6, 6) if tokens > 0 else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
