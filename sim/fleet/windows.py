"""Simulates one cell of each stratum, request by request, with the real router core."""

import random
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from replica.drivers.sim_costs import MODELS_BY_NAME
from sim.adapters import READ_S, AdapterCase, AdapterSluice
from sim.engines import Job
from sim.fleet.day import KINDS, BaseKind, FleetDay, Stratum
from sim.metrics import TPOT_MAX_S, tpot_s, ttft_objective_s, ttft_s
from sim.percentiles import percentile
from sim.policies.registry import entry
from sim.policies.sluice import RouterSettings
from sim.pool import SimPool, SimPoolPlan
from sim.workload import Trace, TraceRequest
from sluice.hashing import BLOCK_TOKENS

# Median tokens of a prompt behind its adapter's common prefix, median tokens of an answer, and the
# standard deviation of the logarithm of both lengths.
_PROMPT, _OUTPUT, _SIGMA = 200.0, 60.0, 0.8
_SYSTEM_BLOCKS = 8
_ADAPTER_ZIPF, _TENANT_ZIPF = 1.0, 0.8
_SLOTS, _MEMORY = 32, 256
_SATURATED = 3000  # requests sent at once to measure a replica's capacity
_WARM = 1 / 3  # first part of a window, whose requests are not counted
_SLOW = 0.25  # speed of a bad replica
_TENANT_REQUESTS = 5  # least requests of a tenant for a meaningful share


@dataclass(frozen=True, slots=True)
class CellWindow:
    """The settings of a simulated cell.

    Attributes:
        stratum: Group of similar cells that this cell represents.
        replicas: Number of replicas of the cell.
        duration_s: Seconds of arrivals.
        rps: Requests per second.
        adapters: Number of adapters of the base.
        tenants: Number of tenants of the base.
        seed: Seed of the arrivals.
    """

    stratum: Stratum
    replicas: int
    duration_s: float
    rps: float
    adapters: int
    tenants: int
    seed: int


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """The figures of a simulated cell, without the warm-up.

    Attributes:
        requests: Number of requests after the warm-up.
        goodput: Share of these requests within the objectives of TTFT and TPOT.
        ttft_p50_s: Median of the time to the first token.
        ttft_p99_s: 99th percentile of the time to the first token.
        hit_ratio: Share of prompt tokens that were cached.
        adapter_read_share: Share of requests that waited for an adapter's read from a disk.
        fairness: Jain's index over the tenants' goodputs. A tenant's goodput is the share of its
            requests within the objectives.
        tenant_least: Tenth percentile of the tenants' goodputs.
        took_s: Processor seconds of the simulation.
    """

    requests: int
    goodput: float
    ttft_p50_s: float
    ttft_p99_s: float
    hit_ratio: float
    adapter_read_share: float
    fairness: float
    tenant_least: float
    took_s: float


def kind_of(name: str) -> BaseKind:
    """Return the kind of base with the name."""
    return next(kind for kind in KINDS if kind.name == name)


def window_of(
    day: FleetDay, stratum: Stratum, *, capacity_rps: float, replicas: int, duration_s: float
) -> CellWindow:
    """Return the settings of the cell that represents a stratum."""
    return CellWindow(
        stratum,
        replicas,
        duration_s,
        stratum.utilisation * capacity_rps * replicas,
        day.adapters // day.bases,
        day.tenants // day.bases,
        day.seed,
    )


def _zipf(count: int, exponent: float) -> list[float]:
    return list(accumulate((rank + 1) ** -exponent for rank in range(count)))


def requests_of(window: CellWindow) -> tuple[Trace, list[str]]:
    """Return the requests of a window, and the adapter of each request."""
    draw = random.Random(f"window {window}")  # noqa: S311 - repeatable on purpose
    adapters = _zipf(window.adapters, _ADAPTER_ZIPF)
    tenants = _zipf(window.tenants, _TENANT_ZIPF)
    ranks = range(max(window.adapters, window.tenants))
    count = int(window.rps * window.duration_s)
    times = sorted(draw.uniform(0.0, window.duration_s) for _ in range(count))
    requests: list[TraceRequest] = []
    chosen: list[str] = []
    block = window.adapters * _SYSTEM_BLOCKS
    for at_s in times:
        adapter = draw.choices(ranks[: window.adapters], cum_weights=adapters)[0]
        tenant = draw.choices(ranks[: window.tenants], cum_weights=tenants)[0]
        own = max(1, round(_PROMPT * draw.lognormvariate(0.0, _SIGMA)))
        output = max(1, round(_OUTPUT * draw.lognormvariate(0.0, _SIGMA)))
        more = -(-own // BLOCK_TOKENS)
        first = adapter * _SYSTEM_BLOCKS
        blocks = (*range(first, first + _SYSTEM_BLOCKS), *range(block, block + more))
        block += more
        prompt = _SYSTEM_BLOCKS * BLOCK_TOKENS + own
        requests.append(TraceRequest(at_s, prompt, output, blocks, -1, f"tenant-{tenant}"))
        chosen.append(f"adapter-{adapter}")
    return Trace("window", BLOCK_TOKENS, tuple(requests)), chosen


@cache
def capacity_rps(kind: BaseKind, adapters: int, tenants: int) -> float:
    """Return the requests per second that one fully used replica serves."""
    stratum = Stratum(kind.name, 1.0, 1.0, has_bad=False)
    window = CellWindow(stratum, 1, 1.0, _SATURATED, adapters, tenants, 0)
    trace, _ = requests_of(window)
    pool = SimPool(
        entry("least_tokens").make(),
        MODELS_BY_NAME[kind.cost],
        SimPoolPlan(1),
        block_tokens=BLOCK_TOKENS,
    )
    return len(trace.requests) / pool.run(trace, 1e-9)


def play(window: CellWindow) -> WindowFigures:
    """Simulate a cell until its requests have ended."""
    began_s = time.process_time()
    kind = kind_of(window.stratum.kind)
    trace, adapters = requests_of(window)
    case = AdapterCase(
        *(True, window.adapters, _ADAPTER_ZIPF, window.replicas, 1, _SLOTS, _MEMORY),
        *(window.rps / window.replicas, window.duration_s, 0.0, False, False, window.seed),
    )
    policy = AdapterSluice(RouterSettings(), case, adapters)
    plan = SimPoolPlan(window.replicas, seed=window.seed)
    pool = SimPool(policy, MODELS_BY_NAME[kind.cost], plan, block_tokens=BLOCK_TOKENS)
    policy.settle([f"adapter-{rank}" for rank in range(window.adapters)], _ADAPTER_ZIPF)
    if window.stratum.has_bad:
        pool.timeline.at(window.duration_s * _WARM, _slow_down, pool)
    pool.run(trace)
    counted = [job for job in pool.jobs if job.arrived_at >= window.duration_s * _WARM]
    return _figures(pool, policy, counted, time.process_time() - began_s)


def _slow_down(pool: SimPool) -> None:
    pool.engines[0].speed *= _SLOW


def _figures(pool: SimPool, policy: AdapterSluice, jobs: list[Job], took_s: float) -> WindowFigures:
    by_tenant: defaultdict[str, list[bool]] = defaultdict(list)
    for job in jobs:
        by_tenant[job.request.tenant].append(_is_good(pool, job))
    shares = [
        sum(goods) / len(goods) for goods in by_tenant.values() if len(goods) >= _TENANT_REQUESTS
    ]
    served = [job for job in jobs if job.first_at is not None]
    waits = [ttft for job in served if (ttft := ttft_s(job)) is not None]
    prompts = sum(job.prompt_tokens for job in served)
    return WindowFigures(
        requests=len(jobs),
        goodput=sum(map(sum, by_tenant.values())) / len(jobs),
        ttft_p50_s=percentile(waits, 50),
        ttft_p99_s=percentile(waits, 99),
        hit_ratio=sum(job.hit_tokens for job in served) / prompts if prompts else 0.0,
        adapter_read_share=sum(policy.waits_s.get(job.number, 0.0) >= READ_S for job in jobs)
        / len(jobs),
        fairness=sum(shares) ** 2 / (len(shares) * sum(it * it for it in shares) or 1.0),
        tenant_least=percentile(shares, 10),
        took_s=took_s,
    )


def _is_good(pool: SimPool, job: Job) -> bool:
    ttft, tpot = ttft_s(job), tpot_s(job)
    objective_s = ttft_objective_s(pool.cost, job.request.prompt_tokens)
    return ttft is not None and tpot is not None and ttft <= objective_s and tpot <= TPOT_MAX_S
