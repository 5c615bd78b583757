"""Computes the figures of a run, which are goodput, TTFT, TPOT, hit ratio and busy share.

TTFT and TPOT are measured at the engine, in the same way for every policy. A request is good if it
meets two objectives. Its TTFT is at most 0.5 s + twice the time of its whole prompt alone on an
idle replica of speed 1. Its mean TPOT is at most 100 ms. A request that was never served has no
TTFT and is not good.
"""

from dataclasses import dataclass
from functools import cache

from replica.drivers.sim_costs import CostModel, StepWork
from sim.engines import Job
from sim.percentiles import percentile
from sim.pool import SimPool

TTFT_SLACK_S = 0.5
TTFT_ALONE = 2.0
TPOT_MAX_S = 0.1


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one run.

    Attributes:
        goodput: Share of requests that met the objective.
        ttft_missed: Share of requests that missed the TTFT objective, or have no first token.
        tpot_missed: Share of requests that met the TTFT objective and missed the TPOT objective.
        unserved: Share of requests that were refused or never ended.
        ttft_p50_s: Median of TTFT.
        ttft_p90_s: 90th percentile of TTFT.
        ttft_p99_s: 99th percentile of TTFT.
        ttft_longest_decile_p99_s: p99 among the tenth of requests with the longest prompts.
        ttft_worst_ratio: Largest TTFT as a multiple of the request's own objective.
        tpot_p99_s: 99th percentile of TPOT.
        hit_ratio: Share of prompt tokens found in a cache.
        busy: Share of the run's time that replicas spent in steps.
        makespan_s: Seconds until the last token.
    """

    goodput: float
    ttft_missed: float
    tpot_missed: float
    unserved: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_longest_decile_p99_s: float
    ttft_worst_ratio: float
    tpot_p99_s: float
    hit_ratio: float
    busy: float
    makespan_s: float


def prefill_s(cost: CostModel, prompt_tokens: int, cached: int = 0) -> float:
    """Return the seconds of a prefill in full steps on an otherwise idle replica."""
    budget = cost.size.step_tokens_max
    total_s, done = 0.0, cached
    while done < prompt_tokens:
        chunk = min(budget, prompt_tokens - done)
        total_s += cost.step_s(StepWork(chunk, chunk * (done + chunk / 2), done))
        done += chunk
    return total_s


@cache
def ttft_objective_s(cost: CostModel, prompt_tokens: int) -> float:
    """Return the TTFT objective of a prompt with this number of tokens."""
    return TTFT_SLACK_S + TTFT_ALONE * prefill_s(cost, prompt_tokens)


def ttft_s(job: Job) -> float | None:
    """Return the seconds from a job's arrival to its first token, or None without one."""
    return None if job.first_at is None else job.first_at - job.arrived_at


def tpot_s(job: Job) -> float | None:
    """Return a job's mean seconds per later token, 0 for one token, None if unfinished."""
    if job.first_at is None or job.ended_at is None:
        return None
    tokens = job.request.output_tokens - 1
    return (job.ended_at - job.first_at) / tokens if tokens else 0.0


def measure(pool: SimPool) -> Metrics:
    """Return the figures of a run that has ended."""
    jobs = pool.jobs
    ttfts: list[tuple[Job, float]] = []
    tpots: list[float] = []
    ttft_missed = tpot_missed = 0
    worst = 0.0
    for job in jobs:
        ttft, tpot = ttft_s(job), tpot_s(job)
        if tpot is not None:
            tpots.append(tpot)
        if ttft is None:
            ttft_missed += 1
            continue
        ttfts.append((job, ttft))
        ratio = ttft / ttft_objective_s(pool.cost, job.request.prompt_tokens)
        worst = max(worst, ratio)
        if ratio > 1.0:
            ttft_missed += 1
        elif tpot is None or tpot > TPOT_MAX_S:
            tpot_missed += 1
    waits = [ttft for _, ttft in ttfts]
    longest = sorted(ttfts, key=lambda item: item[0].request.prompt_tokens)
    longest = longest[len(longest) - max(1, len(longest) // 10) :]
    makespan_s = max((job.ended_at or 0.0) for job in jobs)
    served = [job for job in jobs if job.first_at is not None]
    prompts = sum(job.prompt_tokens for job in served)
    return Metrics(
        goodput=(len(jobs) - ttft_missed - tpot_missed) / len(jobs),
        ttft_missed=ttft_missed / len(jobs),
        tpot_missed=tpot_missed / len(jobs),
        unserved=sum(1 for job in jobs if job.ended_at is None) / len(jobs),
        ttft_p50_s=percentile(waits, 50),
        ttft_p90_s=percentile(waits, 90),
        ttft_p99_s=percentile(waits, 99),
        ttft_longest_decile_p99_s=percentile([ttft for _, ttft in longest], 99),
        ttft_worst_ratio=worst,
        tpot_p99_s=percentile(tpots, 99),
        hit_ratio=sum(job.hit_tokens for job in served) / prompts if prompts else 0.0,
        busy=sum(e.busy_s for e in pool.engines) / max(makespan_s, 1e-9) / len(pool.alive),
        makespan_s=makespan_s,
    )
