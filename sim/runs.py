"""A run of the routing study, with its trace, pool, policy, seed and load."""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from replica.drivers.sim_costs import MODELS_BY_NAME
from sim import ablation, synthetic, traces
from sim.metrics import Metrics, measure
from sim.policies.registry import ROUTER, entry
from sim.policies.sluice import RouterSettings, Sluice
from sim.pool import Policy, SimPool, SimPoolPlan
from sim.workload import Trace

SYNTHETIC = "synthetic"
FORMATS = (*traces.FORMATS, SYNTHETIC)
_ALL_AT_ONCE = 1e-6  # factor on arrival times, so that all requests are present at the start


@dataclass(frozen=True, slots=True)
class RunSource:
    """The source of a run's requests.

    Attributes:
        path: Path of a file, or the settings of a generated workload.
        format_name: One of `FORMATS`.
        requests_max: Number of requests to read from the beginning, or None for all.
    """

    path: str
    format_name: str
    requests_max: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of a run.

    Attributes:
        source: The requests.
        replicas: Number of replicas at the start.
        cost: Name of a cost model.
        load: Arrival rate as a share of the pool's `capacity`.
        policy: Name of a policy, not of a group.
        seed: Seed of trace, speeds and policy.
        speed_spread: Spread of the replicas' speeds, as in `SimPoolPlan`.
        report_age_s: Age in seconds of the engine reports on which the router decides.
        index_delay_s: Age in seconds of the router's prefix index.
        cells: Number of cells for the policy `sluice`, while other policies route the whole pool.
        lose_at_s: Virtual seconds at which replica 0 dies, or None if it stays alive.
        add_at_s: Virtual seconds at which one more replica joins, or None if no replica joins.
    """

    source: RunSource
    replicas: int
    cost: str
    load: float
    policy: str
    seed: int = 0
    speed_spread: float = 0.0
    report_age_s: float = 0.1
    index_delay_s: float = 3.0
    cells: int = 1
    lose_at_s: float | None = None
    add_at_s: float | None = None


@lru_cache(maxsize=4)
def trace_of(source: RunSource, seed: int) -> Trace:
    """Return the requests of a source.

    Raises:
        traces.TraceError: The requests cannot be read or generated.
    """
    if source.format_name == SYNTHETIC:
        workload = synthetic.parse(source.path)
        if source.requests_max is not None:
            workload = replace(workload, requests=source.requests_max)
        return synthetic.generate(workload, seed=seed)
    return traces.load(
        Path(source.path), source.format_name, seed=seed, requests_max=source.requests_max
    )


@cache
def capacity(source: RunSource, replicas: int, cost: str) -> float:
    """Return requests per second at load 1.0.

    The capacity is the throughput of least-tokens routing over replicas of speed 1 when all
    requests are present at time 0.
    """
    trace = trace_of(source, 0)
    policy = entry("least_tokens").make()
    plan = SimPoolPlan(replicas)
    pool = SimPool(policy, MODELS_BY_NAME[cost], plan, block_tokens=trace.block_tokens)
    return len(trace.requests) / pool.run(trace, _ALL_AT_ONCE)


def play(run: Run, requests_per_s: float) -> SimPool:
    """Simulate a run to its end, and return the pool with all its jobs.

    Args:
        run: Settings of the run.
        requests_per_s: The pool's `capacity`.

    Raises:
        PolicyError: The run's policy does not exist.
    """
    trace = trace_of(run.source, run.seed)
    policy, is_shared = _policy(run)
    plan = SimPoolPlan(
        replicas=run.replicas,
        speed_spread=run.speed_spread,
        seed=run.seed,
        lose_at_s=run.lose_at_s,
        add_at_s=run.add_at_s,
        is_shared=is_shared,
    )
    pool = SimPool(policy, MODELS_BY_NAME[run.cost], plan, block_tokens=trace.block_tokens)
    with ablation.without(ablation.rules_of(run.policy)):
        pool.run(trace, trace.time_factor(requests_per_s * run.load))
    return pool


def metrics_of(run: Run, requests_per_s: float) -> Metrics:
    """Simulate a run to its end, and return its figures."""
    return measure(play(run, requests_per_s))


def _policy(run: Run) -> tuple[Policy, bool]:
    if run.policy == ROUTER or ablation.rules_of(run.policy):
        settings = RouterSettings(
            report_age_s=run.report_age_s, index_delay_s=run.index_delay_s, cells=run.cells
        )
        return Sluice(settings), False
    found = entry(run.policy)
    return found.make(), found.is_shared
