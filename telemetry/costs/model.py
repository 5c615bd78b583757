"""Divides the price of paid pool-hours among tenants by the work of their requests. Pure.

An hour of a pool has a price, whether the pool is used or not. The accelerators' time in which
their replicas had a request is *busy*, and all other time is *idle*. The cost of busy time is
divided among the requests by their minimum device time. That is a roofline model, in which prefill
is bound by compute, and decode by memory bandwidth:

    least_s = 2 * parameters * uncached prompt tokens / peak
            + output tokens / batch * weights / bandwidth
            + KV bytes per token * (tokens attended to + cached tokens) / bandwidth

Peak and bandwidth are sums over all accelerators of a replica. `batch` is the mean number of
requests on a busy replica of the pool in that hour. A cached token costs one read of its KV values.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from telemetry.costs.prices import MICRO, AcceleratorPrice, PricedPool, Prices

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Work:
    """The work that a pool did for one tenant and model within an hour.

    A request that spans two hours counts in both hours, by its share of time in each. So the counts
    are fractions.

    Attributes:
        start_ms: Unix time of the hour.
        is_copy: Whether the requests were copies for a shadow stage. No tenant pays for copies.
        attended_tokens: Sum, over all output tokens, of the number of tokens before the output
            token.
    """

    start_ms: int
    pool_id: str
    tenant_id: str
    model: str
    is_copy: bool
    requests: float
    uncached_tokens: float
    cached_tokens: float
    output_tokens: float
    attended_tokens: float


@dataclass(frozen=True, slots=True)
class Busy:
    """The time within an hour in which the replicas of a pool had requests.

    Attributes:
        start_ms: Unix time of the hour.
        busy_s: Seconds with at least one request, summed over the replicas.
        request_s: Seconds on a replica, summed over the requests.
    """

    start_ms: int
    pool_id: str
    busy_s: float
    request_s: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """The accelerators and replicas that the control plane recorded for a pool in one clock hour.

    Attributes:
        start_ms: Unix time of the hour.
        accelerator_hours: Hours of the accelerators that were assigned to replicas.
        unassigned_hours: Hours of replicas without assigned accelerators. The price list has the
            number of accelerators of such a replica.
    """

    start_ms: int
    pool_id: str
    accelerator_hours: float
    unassigned_hours: float

    def paid_hours(self, accelerators_per_replica: int) -> float:
        """Return the accelerator-hours of all replicas, with and without assigned accelerators."""
        return self.accelerator_hours + self.unassigned_hours * accelerators_per_replica


@dataclass(frozen=True, slots=True)
class CostLine:
    """One row of the costs.

    Attributes:
        work: Work of the row, or zero in idle rows.
        busy_micros: The row's share of the cost of busy time, by its work, in millionths of the
            currency.
        idle_micros: Cost of idle time, in millionths of the currency. Only idle rows have such a
            cost, unless it was spread over the other rows.
        is_idle: Whether the row is the cost of idle time, which no tenant caused.
    """

    work: Work
    busy_micros: int = 0
    idle_micros: int = 0
    is_idle: bool = False

    @property
    def micros(self) -> int:
        """The total cost of the row, in millionths of the currency."""
        return self.busy_micros + self.idle_micros


@dataclass(frozen=True, slots=True)
class PoolCost:
    """The cost of a pool over the whole time range.

    Attributes:
        paid_hours: Accelerator-hours.
        paid_by: Source of the paid hours: `list` (the price list), `given` (the query) or
            `recorded` (the control plane).
        busy_hours: Measured accelerator-hours with requests.
        unpaid_hours: Busy hours that exceed the paid hours, because the price list has too few
            replicas.
        least_hours: Minimum accelerator-hours for the same work, by the accelerators' data sheets.
        batch: Mean number of requests on a busy replica.
    """

    pool_id: str
    paid_hours: float
    paid_by: str
    busy_hours: float
    unpaid_hours: float
    least_hours: float
    batch: float
    micros: int
    idle_micros: int
    tokens: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a time range.

    Attributes:
        lines: Rows of the answer. Their costs add up to the costs of the pools.
        unpriced_requests: Pool -> number of requests, for pools that are not in the price list.
    """

    lines: Sequence[CostLine]
    pools: Sequence[PoolCost]
    unpriced_requests: Mapping[str, float]


def split(total: int, weights: Sequence[float]) -> list[int]:
    """Divide an integer in proportion to weights, into integers whose sum is the whole.

    At least one weight must be above 0. The running sums are rounded instead of the shares. So each
    part differs from its exact share by less than 1.
    """
    sums = list(accumulate(weights))
    ends = [round(total * (reached / sums[-1])) for reached in sums]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def least_s(work: Work, pool: PricedPool, kind: AcceleratorPrice, batch: float) -> float:
    """Return the minimum device time for some work, in seconds, by the module's formula."""
    peak = kind.tflops * 1e12 * pool.accelerators_per_replica
    bandwidth = kind.memory_bandwidth_gb_s * 1e9 * pool.accelerators_per_replica
    weight_bytes = pool.parameters * pool.bytes_per_parameter
    kv_bytes = pool.kv_bytes_per_token * (work.attended_tokens + work.cached_tokens)
    prefill_s = 2 * pool.parameters * work.uncached_tokens / peak
    return prefill_s + (work.output_tokens / max(1.0, batch) * weight_bytes + kv_bytes) / bandwidth


def costs(
    prices: Prices,
    busy: Iterable[Busy],
    works: Iterable[Work],
    span_ms: tuple[int, int],
    paid_hours: Mapping[str, float] | None = None,
    recorded: Iterable[Recorded] = (),
) -> Costs:
    """Divide the paid cost of a time range among the work in that range.

    Args:
        prices: Price list with the paid pools. The work of other pools is counted as unpriced.
        busy: Busy times, at most one per hour and pool.
        works: Work, any number of rows per hour and pool.
        span_ms: Time range in Unix milliseconds. Its first and last hour may be partial.
        paid_hours: Pool -> accelerator-hours that replace those of the price list. They are spread
            evenly over the time range.
        recorded: Recorded hours, at most one per hour and pool. They apply to pools for which
            neither `prices` nor `paid_hours` has hours.
    """
    hours = _hours(*span_ms)
    busy_by = {(it.pool_id, it.start_ms): it for it in busy}
    works_by: dict[tuple[str, int], list[Work]] = defaultdict(list)
    recorded_by = {(it.pool_id, it.start_ms): it for it in recorded}
    unpriced: dict[str, float] = defaultdict(float)
    for work in works:
        if work.pool_id in prices.pools:
            works_by[work.pool_id, work.start_ms].append(work)
        else:
            unpriced[work.pool_id] += work.requests
    lines: list[CostLine] = []
    pools: list[PoolCost] = []
    for pool_id, pool in sorted(prices.pools.items()):
        given = (paid_hours or {}).get(pool_id)
        paid_by, paid_in = _paid(pool_id, pool, hours, given, recorded_by)
        paid = sum(paid_in.values())
        total = round(float(prices.accelerator_of(pool_id).price_per_hour) * MICRO * paid)
        its_lines: list[CostLine] = []
        least_hours = 0.0
        nothing = Busy(0, pool_id, 0.0, 0.0)
        parts = split(total, list(paid_in.values())) if paid > 0 else [0] * len(paid_in)
        for (start_ms, paid_then), micros in zip(paid_in.items(), parts, strict=True):
            at = replace(busy_by.get((pool_id, start_ms), nothing), start_ms=start_ms)
            found, least = _hour(prices, at, works_by[pool_id, start_ms], micros, paid_then)
            its_lines += found
            least_hours += least
        lines += its_lines
        pools.append(_pool(pool_id, pool, (paid_by, paid_in), least_hours, its_lines, busy_by))
    return Costs(lines, pools, unpriced)


def spread_idle(lines: Sequence[CostLine]) -> list[CostLine]:
    """Spread each pool's idle cost over its users by their busy cost. An unused pool has none."""
    by_pool: dict[str, list[CostLine]] = defaultdict(list)
    for line in lines:
        by_pool[line.work.pool_id].append(line)
    found: list[CostLine] = []
    for its_lines in by_pool.values():
        used = [line for line in its_lines if not line.is_idle]
        weights = [line.busy_micros for line in used]
        if not sum(weights):
            found += its_lines
            continue
        idle = sum(line.idle_micros for line in its_lines)
        parts = split(idle, weights)
        found += [replace(line, idle_micros=part) for line, part in zip(used, parts, strict=True)]
    return found


def _hours(from_ms: int, to_ms: int) -> dict[int, tuple[int, int]]:
    """Return the start of each hour -> the hour's part of a time range, in Unix milliseconds."""
    first = from_ms // HOUR_MS * HOUR_MS
    return {
        start: (max(start, from_ms), min(start + HOUR_MS, to_ms))
        for start in range(first, to_ms, HOUR_MS)
    }


def _paid(
    pool_id: str,
    pool: PricedPool,
    hours: Mapping[int, tuple[int, int]],
    given: float | None,
    recorded: Mapping[tuple[str, int], Recorded],
) -> tuple[str, dict[int, float]]:
    """Return the source of the paid hours, and the start of each hour -> accelerator-hours."""
    if given is not None:
        each = given / sum(end - begin for begin, end in hours.values())
        return "given", {start: each * (end - begin) for start, (begin, end) in hours.items()}
    if pool.replicas is not None:
        return "list", {start: pool.accelerator_hours(*hour) for start, hour in hours.items()}
    nothing = Recorded(0, pool_id, 0.0, 0.0)
    size = pool.accelerators_per_replica
    return "recorded", {
        start: recorded.get((pool_id, start), nothing).paid_hours(size) for start in hours
    }


def _hour(
    prices: Prices, busy: Busy, works: Sequence[Work], micros: int, paid_hours: float
) -> tuple[list[CostLine], float]:
    """Return the rows of a pool in one hour, and the minimum accelerator-hours of its work."""
    pool, kind = prices.pools[busy.pool_id], prices.accelerator_of(busy.pool_id)
    each = pool.accelerators_per_replica
    batch = busy.request_s / busy.busy_s if busy.busy_s > 0 else 1.0
    weights = [least_s(work, pool, kind, batch) for work in works]
    busy_hours = busy.busy_s * each / 3600
    share = min(1.0, busy_hours / paid_hours) if paid_hours > 0 else 1.0
    busy_micros = round(micros * share) if sum(weights) > 0 else 0
    parts = split(busy_micros, weights) if busy_micros else [0] * len(works)
    lines = [CostLine(work, part) for work, part in zip(works, parts, strict=True)]
    idle = Work(busy.start_ms, busy.pool_id, "", "", False, 0.0, 0.0, 0.0, 0.0, 0.0)
    lines.append(CostLine(idle, 0, micros - busy_micros, is_idle=True))
    return lines, sum(weights) * each / 3600


def _pool(
    pool_id: str,
    pool: PricedPool,
    paid: tuple[str, Mapping[int, float]],
    least_hours: float,
    lines: Sequence[CostLine],
    busy_by: Mapping[tuple[str, int], Busy],
) -> PoolCost:
    paid_by, paid_in = paid
    its_busy = [it for it in busy_by.values() if it.pool_id == pool_id and it.start_ms in paid_in]
    busy_s = sum(it.busy_s for it in its_busy)
    each = pool.accelerators_per_replica
    over = (it.busy_s * each / 3600 - paid_in[it.start_ms] for it in its_busy)
    works = [line.work for line in lines if not line.work.is_copy]
    return PoolCost(
        pool_id,
        sum(paid_in.values()),
        paid_by,
        busy_s * each / 3600,
        sum(max(0.0, hours) for hours in over),
        least_hours,
        sum(it.request_s for it in its_busy) / busy_s if busy_s else 0.0,
        sum(line.micros for line in lines),
        sum(line.idle_micros for line in lines),
        sum(work.uncached_tokens + work.cached_tokens + work.output_tokens for work in works),
    )
