"""Compares routing policies on traces: `python -m sim.routing --trace FILE --format mooncake ...`.

A trace is replayed through one or several policies over simulated replicas. The figures are
goodput, TTFT, TPOT and hit ratio, as means over seeds. `sluice` is the real router core. Every
other policy decides like another platform, on exact and current state. The results are in
docs/routing-study.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from replica.drivers.sim_costs import MODELS_BY_NAME
from sim import ablation, plots
from sim.metrics import Metrics
from sim.policies import registry
from sim.runs import FORMATS, Run, RunSource, capacity, metrics_of, trace_of
from sim.traces import TraceError

_FINALISTS = 3  # policies of a group that run on all seeds, while others run only on the first


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """The figures of one policy at one load over all seeds.

    Attributes:
        policy: Name of the policy, or of its group.
        winner: Policy to which the figures belong, which is the best policy of a group.
        run: Settings of the run with the first seed.
        seeds: Seeds of all runs.
        by_seed: Figures of the winner, one entry per seed.
        candidates: Goodput of a group's policies on the first seed.
    """

    policy: str
    winner: str
    run: Run
    seeds: tuple[int, ...]
    by_seed: tuple[Metrics, ...]
    candidates: dict[str, float]

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the seeds."""
        return sum(getattr(metrics, name) for metrics in self.by_seed) / len(self.by_seed)

    def as_json(self, trace: str) -> dict[str, Any]:
        """Return the result for the output file, where percentiles are means over seeds."""
        mean = {field.name: round(self.mean(field.name), 5) for field in fields(Metrics)}
        settings = asdict(self.run)
        source = settings.pop("source")
        del settings["policy"], settings["seed"], settings["load"], settings["replicas"]
        settings |= {"seeds": list(self.seeds), "format": source["format_name"]}
        settings |= {"requests_max": source["requests_max"], "winner": self.winner}
        if self.candidates:
            settings["candidates"] = self.candidates
        return {
            "policy": self.policy,
            "trace": trace,
            "replicas": self.run.replicas,
            "load": self.run.load,
            "goodput_mean": mean["goodput"],
            "goodput_by_seed": [round(metrics.goodput, 5) for metrics in self.by_seed],
            "ttft_s": {name: mean[f"ttft_{name}_s"] for name in ("p50", "p90", "p99")},
            "ttft_longest_decile_p99_s": mean["ttft_longest_decile_p99_s"],
            "tpot_ms": {"p99": round(1e3 * mean["tpot_p99_s"], 2)},
            "hit_ratio": mean["hit_ratio"],
            "ttft_worst_ratio": mean["ttft_worst_ratio"],
            "missed": {"ttft": mean["ttft_missed"], "tpot": mean["tpot_missed"]},
            "unserved": mean["unserved"],
            "busy": mean["busy"],
            "settings": settings,
        }


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _timed(run: Run, requests_per_s: float) -> tuple[Metrics, float]:
    started_s = time.perf_counter()
    metrics = metrics_of(run, requests_per_s)
    return metrics, time.perf_counter() - started_s


def _play_all(
    runs: Sequence[Run], requests_per_s: float, executor: Executor | None
) -> list[Metrics]:
    """Simulate all runs, in processes if there is an executor, and return figures in order."""
    futures: list[Future[tuple[Metrics, float]]] = []
    if executor is not None:
        futures = [executor.submit(_timed, run, requests_per_s) for run in runs]
    results: list[Metrics] = []
    for number, run in enumerate(runs):
        metrics, took_s = futures[number].result() if futures else _timed(run, requests_per_s)
        refused = f", {metrics.unserved:.2%} not served" if metrics.unserved else ""
        _note(
            f"{run.policy} load {run.load:g} seed {run.seed}: goodput {metrics.goodput:.4f}"
            f"{refused} ({took_s:.1f} s)"
        )
        results.append(metrics)
    return results


def compare(
    base: Run,
    policies: Iterable[str],
    loads: Iterable[float],
    seeds: Sequence[int],
    executor: Executor | None = None,
) -> list[RoutingResult]:
    """Run every policy at every load on every seed.

    All policies of a group run on the first seed, and the group's best three on all seeds.

    Args:
        base: Run with all other settings. Its policy, load and seed are ignored.
        policies: Names of policies or groups.
        loads: Shares of capacity.
        seeds: Seeds, at least one.
        executor: Executor of processes, or None to run in this process.

    Raises:
        TraceError: The trace cannot be read.
        PolicyError: A name is no policy and no group.
    """
    rate = capacity(base.source, base.replicas, base.cost)
    _note(f"load 1.0 is {rate:.4g} requests/s")
    results: list[RoutingResult] = []
    for load in loads:
        for policy in policies:
            members = registry.GROUPS.get(policy, (policy,))
            first, *rest = seeds
            runs = [replace(base, policy=name, load=load, seed=first) for name in members]
            played = _play_all(runs, rate, executor)
            ranked = sorted(zip(played, runs, strict=True), key=lambda item: -item[0].goodput)
            best: RoutingResult | None = None
            for metrics, run in ranked[:_FINALISTS]:
                more = _play_all([replace(run, seed=seed) for seed in rest], rate, executor)
                result = RoutingResult(
                    policy=policy,
                    winner=run.policy,
                    run=run,
                    seeds=tuple(seeds),
                    by_seed=(metrics, *more),
                    candidates={r.policy: round(m.goodput, 5) for m, r in ranked}
                    if len(ranked) > 1
                    else {},
                )
                if best is None or result.mean("goodput") > best.mean("goodput"):
                    best = result
            assert best is not None
            results.append(best)
    return results


def table(results: Sequence[RoutingResult]) -> str:
    """Return the results as a readable table."""
    lines = [
        f"{'policy':30s} {'load':>5s} {'goodput':>8s} {'min..max':>13s} {'TTFT p50':>9s}"
        f" {'p90':>7s} {'p99':>7s} {'long p99':>9s} {'TPOT p99':>9s} {'hit':>6s} {'worst':>6s}"
    ]
    for result in results:
        name = result.policy
        if result.winner != result.policy:
            name += f" = {result.winner}"
        goodputs = [metrics.goodput for metrics in result.by_seed]
        mean = result.mean
        lines.append(
            f"{name:30s} {result.run.load:5.2f} {mean('goodput'):8.4f}"
            f" {min(goodputs):6.3f}-{max(goodputs):5.3f}  {mean('ttft_p50_s'):8.3f}s"
            f" {mean('ttft_p90_s'):6.2f}s {mean('ttft_p99_s'):6.2f}s"
            f" {mean('ttft_longest_decile_p99_s'):8.2f}s {1e3 * mean('tpot_p99_s'):7.0f}ms"
            f" {mean('hit_ratio'):6.3f} {mean('ttft_worst_ratio'):5.1f}x"
        )
    return "\n".join(lines)


def _numbers(
    kind: Callable[[str], Any], *, is_zero_allowed: bool
) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
        if any(value < 0 or (value == 0 and not is_zero_allowed) for value in values):
            raise argparse.ArgumentTypeError(f"{text!r} has a number that is too small")
        return values

    return parse


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return parse


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="policies: " + ", ".join(registry.names()) + "\n\nS prefill_load_scale, T threshold"
        " in full steps, ORDER fcfs or wspt; dynamo_best, dynq_best, peer_best and oracle are the"
        " best of several on these seeds.",
    )
    add = parser.add_argument
    add("--trace", required=True, help="file, .gz or plain; for synthetic: SETTING=VALUE,...")
    add("--format", required=True, choices=FORMATS, dest="format_name")
    add("--requests-max", type=_positive(int), help="only the first requests of the file")
    add("--replicas", type=_positive(int), default=8, help="default %(default)s")
    add("--cost", choices=MODELS_BY_NAME, default="h70", help="time of a step, default %(default)s")
    add(
        "--load",
        type=_numbers(float, is_zero_allowed=False),
        default=(0.95,),
        help="shares of capacity, by comma",
    )
    add("--policy", default="sluice", help="names by comma, default %(default)s; see below")
    add("--ablate", action="store_true", help="sluice, and sluice without each single rule")
    add(
        "--seeds",
        type=_numbers(int, is_zero_allowed=True),
        default=(0,),
        help="by comma, default 0",
    )
    add("--report-age-s", type=_seconds, default=0.1, help="of what sluice knows of an engine")
    add("--index-delay-s", type=_seconds, default=3.0, help="age of sluice's index of blocks")
    add("--speed-spread", type=_share, default=0.0, help="speeds are 1-S..1+S, drawn by seed")
    add("--cells", type=_positive(int), default=1, help="of sluice; replicas are dealt out")
    add("--lose-replica-at-s", type=_seconds, help="replica 0 dies then, in virtual seconds")
    add("--add-replica-at-s", type=_seconds, help="one more joins then, its cache empty")
    add("--jobs", type=_positive(int), default=1, help="processes, default %(default)s")
    add("--json", type=Path, metavar="OUT", help="an object; a list for several policies or loads")
    add("--plot", type=Path, metavar="OUT.png", help="a picture of the comparison")
    return parser


def _base(arguments: argparse.Namespace) -> Run:
    return Run(
        source=RunSource(arguments.trace, arguments.format_name, arguments.requests_max),
        replicas=arguments.replicas,
        cost=arguments.cost,
        load=0.0,
        policy="",
        speed_spread=arguments.speed_spread,
        report_age_s=arguments.report_age_s,
        index_delay_s=arguments.index_delay_s,
        cells=arguments.cells,
        lose_at_s=arguments.lose_replica_at_s,
        add_at_s=arguments.add_replica_at_s,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the policies that the command line names, and print their figures."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    policies = [name.strip() for name in arguments.policy.split(",")]
    if arguments.ablate:
        policies = ablation.policies()
    if arguments.cells > arguments.replicas:
        parser.error(f"{arguments.cells} cells need at least as many replicas")
    if arguments.lose_replica_at_s is not None and arguments.replicas == 1:
        parser.error("the only replica cannot be lost: nothing would be left to serve")
    base = _base(arguments)
    try:
        for policy in policies:
            is_router = policy == registry.ROUTER or ablation.rules_of(policy)
            if policy not in registry.GROUPS and not is_router:
                registry.entry(policy)
        trace = trace_of(base.source, arguments.seeds[0])
        with ExitStack() as stack:
            executor = (
                stack.enter_context(ProcessPoolExecutor(arguments.jobs))
                if arguments.jobs > 1
                else None
            )
            results = compare(base, policies, arguments.load, arguments.seeds, executor)
    except (TraceError, registry.PolicyError, ablation.UnknownRuleError) as error:
        parser.error(str(error))
    print(table(results))
    records = [result.as_json(trace.name) for result in results]
    if arguments.json:
        text = json.dumps(records if len(records) > 1 else records[0], indent=2)
        arguments.json.write_text(text + "\n")
    if arguments.plot:
        plots.compare(records, arguments.plot)


if __name__ == "__main__":
    main()
