"""Fairness between tenants: `python -m sim.fairness --scenario overload2 --scheduler sluice,vtc`.

Generated or recorded overloads are simulated on replicas with little memory. The figures are the
gap in service between tenants in 60-second windows, tokens per second, and the TTFT of the tenant
with the fewest requests. They are means over seeds. `sluice` is the real router core with the queue
in the router. The other schedulers decide inside each engine (`sim.fair_schedulers`). The results
are in docs/fairness.md.
"""

import argparse
import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from replica.drivers.sim_costs import EngineSize, M8Cost
from router.core.types.request import Request
from sim import ablation
from sim.engines import Job
from sim.fair_schedulers import OUTPUT_SERVICE, SCHEDULERS, PerEngine
from sim.metrics import ttft_s
from sim.percentiles import percentile
from sim.policies.sluice import RouterSettings, Sluice
from sim.pool import SimPool, SimPoolPlan
from sim.workload import Trace, TraceRequest

KV_TOKENS = 35_000
BLOCK = 16
DURATION_S = 240.0
HALF_WINDOW_S = 30
ARENA = "arena"
ARENA_FASTER = 3.5
ROUTER = "sluice"
_SIGMA = 0.4  # standard deviation of the logarithm of prompt and output lengths


class SmallM8(M8Cost):
    """The cost model m8 with little KV memory, so that memory is full under these loads."""

    _KV_TOKENS = KV_TOKENS
    size = EngineSize(blocks=KV_TOKENS // BLOCK)


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals of one tenant. `prompt` and `output` are median lengths in tokens.

    Attributes:
        periods: (start, end) of the time ranges with arrivals, in seconds.
    """

    tenant: str
    rate: float
    prompt: int
    output: int
    periods: tuple[tuple[float, float], ...] = ((0.0, DURATION_S),)
    weight: int = 1
    priority: int = 0
    reserved_permille: int = 0


_SHORT = ((0.0, 80.0),)
SCENARIOS: dict[str, tuple[Load, ...]] = {
    "overload2": (Load("A", 5, 256, 256), Load("B", 10, 256, 256)),
    "light_vs_flood": (Load("light", 0.5, 256, 256), Load("flood", 14, 256, 256)),
    "short_long": (Load("short", 6, 64, 512), Load("long", 12, 512, 64)),
    "onoff": (
        Load("steady", 5, 256, 256),
        Load("onoff", 12, 256, 256, ((0.0, 40.0), (80.0, 120.0), (160.0, 200.0))),
    ),
    "weights": (
        Load("w1", 10, 256, 256, weight=1),
        Load("w2", 10, 128, 384, weight=2),
        Load("w5", 10, 384, 128, weight=5),
    ),
    "documents": (
        Load("documents", 0.44, 8000, 150, _SHORT),
        *(Load(f"chat-{number}", 2.2 / 12, 1000, 150, _SHORT) for number in range(12)),
    ),
    "tiers": (
        Load("high", 2, 256, 256, priority=9),
        Load("low", 10, 256, 256, priority=1, reserved_permille=100),
    ),
}


def scenario(name: str, *, seed: int, replicas: int, arena: Path | None) -> Trace:
    """Return the requests of a scenario for a number of replicas.

    Raises:
        OSError: The recorded trace cannot be read.
    """
    if name == ARENA:
        assert arena is not None
        rows = _recorded(arena, seed, replicas)
    else:
        rows = _generated(SCENARIOS[name], seed, replicas)
    return _trace(name, rows)


def trace_of(name: str, loads: Sequence[Load], seed: int, replicas: int = 1) -> Trace:
    """Return the requests of all tenants' loads for `replicas`, without shared prefixes."""
    return _trace(name, _generated(loads, seed, replicas))


def _trace(name: str, rows: Sequence["_Row"]) -> Trace:
    blocks = count()
    requests = [
        TraceRequest(at_s, prompt, output, _fresh(blocks, prompt), -1, tenant, priority)
        for at_s, tenant, prompt, output, priority in sorted(rows)
    ]
    return Trace(name, BLOCK, tuple(requests))


def _fresh(blocks: Iterator[int], tokens: int) -> tuple[int, ...]:
    return tuple(next(blocks) for _ in range(-(-tokens // BLOCK)))


def _generated(loads: Sequence[Load], seed: int, replicas: int) -> list["_Row"]:
    draw = random.Random(seed)  # noqa: S311 - repeatable on purpose
    rows: list[_Row] = []
    for load in loads:
        for start_s, end_s in load.periods:
            at_s = start_s
            while (at_s := at_s + draw.expovariate(load.rate * replicas)) <= end_s:
                prompt = max(1, int(draw.lognormvariate(0, _SIGMA) * load.prompt))
                output = max(1, int(draw.lognormvariate(0, _SIGMA) * load.output))
                rows.append((at_s, load.tenant, prompt, output, load.priority))
    return rows


def _recorded(path: Path, seed: int, replicas: int) -> list["_Row"]:
    """Return the requests of a recorded trace, and their copies for further replicas.

    The trace has the columns t_s, client, prompt_tokens and output_tokens. For each further
    replica, a copy of each request arrives up to a second later.
    """
    draw = random.Random(seed)  # noqa: S311 - repeatable on purpose
    rows: list[_Row] = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            at_s = float(row["t_s"]) / ARENA_FASTER
            prompt, output = max(1, int(row["prompt_tokens"])), max(1, int(row["output_tokens"]))
            for copy in range(replicas):
                later_s = draw.random() if copy else 0.0
                rows.append((at_s + later_s, row["client"], prompt, output, 0))
    return rows


_Row = tuple[float, str, int, int, int]  # arrival, tenant, prompt, output, priority


class TieredSluice(Sluice):
    """The router core, with weights and tiers of tenants as a gateway sends them."""

    def __init__(self, settings: RouterSettings, loads: Sequence[Load]) -> None:
        super().__init__(settings)
        self._loads = {load.tenant: load for load in loads}

    def request(self, job: Job, handle: int, cell_id: str) -> Request:
        """Return the request of a job, with the weight and the reserved share of its tenant."""
        request = super().request(job, handle, cell_id)
        load = self._loads.get(request.tenant_id)
        if load is not None:
            request.weight = load.weight
            request.reserved_permille = load.reserved_permille
        return request


@dataclass(frozen=True, slots=True)
class Figures:
    """Fairness figures of a run. A figure that does not apply to the run is NaN.

    Attributes:
        mean_gap: Mean over 60-s windows of the sum over tenants of min(best served - own, own unmet
            demand). The unit is prompt tokens + 2 x output tokens.
        max_gap: Largest gap of these windows.
        tokens_per_s: Prompt and output tokens of requests that ended before the last arrival.
        ttft_p50_s: Median TTFT of the watched tenant, which is the tenant with the least demand. In
            the recorded trace, which has many tenants, it is the tenant with the median demand.
        ttft_p99_s: 99th percentile of the watched tenant's TTFT.
        weight_error: Largest |share / (weight / sum of weights) - 1| in any 60-second window in
            which all tenants wait.
        behind_lower_s: Longest wait of a request, in seconds, after a request of a lower tier was
            dispatched although the former request had arrived.
    """

    mean_gap: float
    max_gap: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    weight_error: float
    behind_lower_s: float


def play(
    name: str,
    scheduler: str,
    *,
    seed: int = 0,
    replicas: int = 1,
    arena: Path | None = None,
    report_age_s: float = 0.1,
) -> Figures:
    """Run a scenario to its end and return its fairness figures.

    Raises:
        OSError: The recorded trace cannot be read.
    """
    trace = scenario(name, seed=seed, replicas=replicas, arena=arena)
    loads = SCENARIOS.get(name, ())
    policy: TieredSluice | PerEngine
    rules = ablation.rules_of(scheduler)
    if scheduler == ROUTER or rules:
        policy = TieredSluice(RouterSettings(report_age_s=report_age_s), loads)
    else:
        mean = sum(request.output_tokens for request in trace.requests) / len(trace.requests)
        policy = PerEngine(scheduler, mean)
    plan = SimPoolPlan(replicas, seed=seed, kv_tokens=KV_TOKENS)
    pool = SimPool(policy, SmallM8(), plan, block_tokens=BLOCK)
    with ablation.without(rules):
        end_s = pool.run(trace)
    return measure(pool.jobs, loads, end_s, per_window=name == ARENA)


def measure(
    jobs: Sequence[Job], loads: Sequence[Load], end_s: float, *, per_window: bool
) -> Figures:
    """Return the figures of jobs that have all ended."""
    last_s = min(end_s, jobs[-1].request.arrived_s)
    services = Services(jobs, end_s)
    gaps = services.gaps(int(last_s))
    demand = services.demand()
    by_demand = sorted(demand, key=lambda tenant: demand[tenant])
    watched = by_demand[len(by_demand) // 2 if per_window else 0]
    waits = [ttft_s(job) or 0.0 for job in jobs if job.request.tenant == watched]
    done = [job.request for job in jobs if job.ended_at is not None and job.ended_at <= last_s]
    weights = {load.tenant: load.weight for load in loads}
    has_weights = len(set(weights.values())) > 1
    return Figures(
        mean_gap=sum(gaps) / len(gaps),
        max_gap=max(gaps),
        tokens_per_s=sum(r.prompt_tokens + r.output_tokens for r in done) / last_s,
        ttft_p50_s=percentile(waits, 50),
        ttft_p99_s=percentile(waits, 99),
        weight_error=services.weight_error(weights, int(last_s)) if has_weights else float("nan"),
        behind_lower_s=behind_lower_s(jobs),
    )


class Services:
    """Requested and delivered service, by tenant and second.

    A prompt counts as delivered when its engine admits the request, output tokens when generated.
    """

    def __init__(self, jobs: Sequence[Job], end_s: float) -> None:
        size = int(end_s) + 2
        self._jobs = jobs
        tenants = sorted({job.request.tenant for job in jobs})
        self._demand = {tenant: [0.0] * size for tenant in tenants}
        self._served = {tenant: [0.0] * size for tenant in tenants}
        for job in jobs:
            request = job.request
            asked, served = self._demand[request.tenant], self._served[request.tenant]
            asked[int(job.arrived_at)] += _service(request)
            served[int(job.admitted_at)] += request.prompt_tokens
            _spread(served, job)
        for table in (self._demand, self._served):
            for tenant, amounts in table.items():
                table[tenant] = [0.0]
                for amount in amounts:  # cumulative, so each entry is the service before a second
                    table[tenant].append(table[tenant][-1] + amount)

    def demand(self) -> dict[str, float]:
        """Return the total requested service by tenant."""
        return {tenant: asked[-1] for tenant, asked in self._demand.items()}

    def served(self, start: int, end: int) -> dict[str, float]:
        """Return the service between two seconds, by tenant."""
        return {tenant: amounts[end] - amounts[start] for tenant, amounts in self._served.items()}

    def gaps(self, last: int) -> list[float]:
        """Return the gap of each window that ends by `last`."""
        out: list[float] = []
        for middle in range(HALF_WINDOW_S, last - HALF_WINDOW_S):
            start, end = middle - HALF_WINDOW_S, middle + HALF_WINDOW_S
            own = self.served(start, end)
            best = max(own.values())
            unmet = {t: max(0.0, self._demand[t][end] - self._served[t][end]) for t in own}
            out.append(sum(min(best - amount, unmet[t]) for t, amount in own.items()))
        return out

    def weight_error(self, weights: dict[str, int], last: int) -> float:
        """Return the largest relative error of a share in windows in which all tenants wait."""
        total_weight = sum(weights.values())
        waiting = {tenant: self._waits(tenant, last) for tenant in weights}
        worst = 0.0
        for start in range(last - 2 * HALF_WINDOW_S):
            end = start + 2 * HALF_WINDOW_S
            if not all(all(waiting[tenant][start:end]) for tenant in weights):
                continue
            own = {
                tenant: self._served[tenant][end] - self._served[tenant][start]
                for tenant in weights
            }
            total = sum(own.values())
            for tenant, amount in own.items():
                worst = max(worst, abs(amount / total * total_weight / weights[tenant] - 1.0))
        return worst

    def _waits(self, tenant: str, last: int) -> list[bool]:
        """Return, for each second, whether a job of the tenant waits during the whole second."""
        spans = sorted(
            (job.arrived_at, job.admitted_at) for job in self._jobs if job.request.tenant == tenant
        )
        out = [False] * (last + 1)
        until = 0.0
        for (arrived, admitted), (following, _) in pairwise([*spans, (float("inf"), 0.0)]):
            until = max(until, admitted)
            end = min(until, following) if following > until else until
            for second in range(-int(-arrived // 1), min(int(end), last + 1)):
                out[second] = True
        return out


def _service(request: TraceRequest) -> float:
    return request.prompt_tokens + OUTPUT_SERVICE * request.output_tokens


def _spread(served: list[float], job: Job) -> None:
    """Spread a job's output evenly between its first and its last token."""
    assert job.first_at is not None
    assert job.ended_at is not None
    tokens = job.request.output_tokens
    begins_s, ends_s = job.first_at, job.ended_at
    if int(begins_s) == int(ends_s):
        served[int(begins_s)] += OUTPUT_SERVICE * tokens
        return
    per_s = OUTPUT_SERVICE * tokens / (ends_s - begins_s)
    for second in range(int(begins_s), int(ends_s) + 1):
        served[second] += per_s * (min(ends_s, second + 1) - max(begins_s, second))


def behind_lower_s(jobs: Sequence[Job]) -> float:
    """Return the longest time that a job waited after a lower tier's job had been preferred."""
    if len({job.request.priority for job in jobs}) == 1:
        return float("nan")
    worst = 0.0
    for job in jobs:
        preferred = [
            other.dispatched_at
            for other in jobs
            if other.request.priority < job.request.priority
            and job.arrived_at < other.dispatched_at < job.dispatched_at
        ]
        if preferred:
            worst = max(worst, job.dispatched_at - min(preferred))
    return worst


@dataclass(frozen=True, slots=True)
class FairnessResult:
    """The figures of one scheduler in one scenario, for each seed."""

    scenario: str
    scheduler: str
    replicas: int
    seeds: tuple[int, ...]
    by_seed: tuple[Figures, ...]

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the seeds."""
        return sum(getattr(figures, name) for figures in self.by_seed) / len(self.by_seed)

    def as_json(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the result in the form of the output file."""
        figures = {f.name: _rounded(self.mean(f.name)) for f in fields(Figures)}
        by_seed = [
            {name: _rounded(value) for name, value in asdict(one).items()} for one in self.by_seed
        ]
        return {
            "scenario": self.scenario,
            "scheduler": self.scheduler,
            "replicas": self.replicas,
            **figures,
            "by_seed": by_seed,
            "settings": {"seeds": list(self.seeds), **settings},
        }


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 3)  # noqa: PLR0124 - NaN


def table(results: Sequence[FairnessResult]) -> str:
    """Return the results as a readable table."""
    lines = [
        f"{'scenario':15s} {'scheduler':10s} {'N':>2s} {'mean gap':>9s} {'max gap':>9s}"
        f" {'tokens/s':>9s} {'TTFT p50':>9s} {'p99':>9s} {'weights':>8s} {'behind':>7s}"
    ]
    for result in results:
        mean = result.mean
        lines.append(
            f"{result.scenario:15s} {result.scheduler:10s} {result.replicas:2d}"
            f" {mean('mean_gap'):9.0f} {mean('max_gap'):9.0f} {mean('tokens_per_s'):9.0f}"
            f" {mean('ttft_p50_s'):8.2f}s {mean('ttft_p99_s'):8.2f}s"
            f" {mean('weight_error'):8.3f} {mean('behind_lower_s'):6.2f}s"
        )
    return "\n".join(lines)


def _words(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(part.strip() for part in text.split(","))
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {unknown[0]}; known: {', '.join(known)}")
        return words

    return parse


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.fairness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    scenarios = (*SCENARIOS, ARENA)
    schedulers = (*ablation.policies(), *SCHEDULERS)
    add("--scenario", type=_words(scenarios), default=("overload2",), help=", ".join(scenarios))
    add("--scheduler", type=_words(schedulers), default=(ROUTER,), help=", ".join(schedulers))
    add("--ablate", action="store_true", help="sluice, and sluice without each single rule")
    add("--replicas", type=int, default=1, help="the load grows with them; default %(default)s")
    add("--seeds", type=_seeds, default=(0,), help="by comma, default 0")
    add("--trace", type=Path, metavar="CSV", help=f"of the scenario {ARENA}")
    add("--report-age-s", type=float, default=0.1, help="of what sluice knows of an engine")
    add("--json", type=Path, metavar="OUT", help="an object; a list for several results")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the schedulers that the command line names, and print their figures."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if ARENA in arguments.scenario and arguments.trace is None:
        parser.error(f"the scenario {ARENA} needs --trace")
    results: list[FairnessResult] = []
    for name in arguments.scenario:
        for scheduler in ablation.policies() if arguments.ablate else arguments.scheduler:
            figures = [
                play(
                    *(name, scheduler),
                    seed=seed,
                    replicas=arguments.replicas,
                    arena=arguments.trace,
                    report_age_s=arguments.report_age_s,
                )
                for seed in arguments.seeds
            ]
            results.append(
                FairnessResult(name, scheduler, arguments.replicas, arguments.seeds, tuple(figures))
            )
    print(table(results))
    if arguments.json:
        settings = {"report_age_s": arguments.report_age_s, "kv_tokens": KV_TOKENS, "cost": "m8"}
        records = [result.as_json(settings) for result in results]
        text = json.dumps(records if len(records) > 1 else records[0], indent=2)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
