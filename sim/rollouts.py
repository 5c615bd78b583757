"""Simulates rollouts: `python -m sim.rollouts`, or `--scenario slow --seeds 50 --rate 100`.

Generated traffic is split by the real code (`sluice.split`) and counted in windows of ten seconds.
These windows step the real state machine (`control_plane.rollouts`) until it has promoted the
release or rolled it back, without an operator. The figures are the share of wrong decisions, the
time to the decision, and the number of requests that the release served. Times are virtual. The
results are in docs/rollouts.md.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from control_plane.rollouts.evidence import Metric, Window
from control_plane.rollouts.machine import step
from control_plane.rollouts.plan import Plan, Stage
from control_plane.rollouts.state import (
    ENDED,
    STATE,
    Event,
    Evidence,
    Expectations,
    Phase,
    Prepare,
    Ready,
    Restarted,
    RollBack,
    Rollout,
    SentBack,
    Start,
)
from sim.percentiles import percentile
from sim.rollout_edge import is_accused
from sim.rollout_traffic import CONTROL, WINDOW_S, SimRelease, Traffic, TrafficProfile, tenant_id
from sluice.split import ReleaseSplit

SCENARIOS: dict[str, SimRelease] = {
    "identical": CONTROL,
    "better": replace(CONTROL, ttft_ms=240.0, errors=0.008, golden_wrong=0.0),
    "wrong": replace(CONTROL, golden_wrong=0.6),
    "slow": replace(CONTROL, ttft_ms=900.0, tpot_us=60_000.0),
    "errors": replace(CONTROL, errors=0.05),
    "longer": replace(CONTROL, output_tokens=400.0),
    "shorter": replace(CONTROL, output_tokens=100.0),
    "refusing": replace(CONTROL, refusals=0.10),
    "garbage": replace(CONTROL, repetitive=0.95, cut=0.9),
    "silent": replace(CONTROL, empty=0.9),
    "inert": replace(CONTROL, base_like=0.95),
    "noise": replace(CONTROL, surprisal_mnats=9_000.0, entropy_mnats=4_000.0),
}
GOOD = ("identical", "better")
SEEDS = 20
SEEDS_IDENTICAL = 200  # enough to measure the stated false-alarm rate
_WINDOW_MS = round(WINDOW_S * 1000)
_WARM_WINDOWS = 30  # windows with only control's requests, before the rollout starts
_LAG_WINDOWS = 1  # windows after which all requests of a window have ended
_RESTART_WINDOWS = 50  # windows between two restarts of the control plane
_WINDOWS_MAX = 20_000
_PINNED_OLD, _PINNED_NEW = 5, 9  # numbers of the tenants pinned to the old and the new release


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """The end of a rollout.

    Attributes:
        seed: Seed of traffic and salt.
        phase: `DONE` or `ROLLED_BACK`, or another phase of a rollout that outlasted `_WINDOWS_MAX`.
        stage: Number of the last stage.
        metric: Metric of the breached gate.
        lasted_s: Seconds from the start of the first stage to the end.
        exposed: Requests of unpinned tenants that canary served.
        judged: Canary's requests that the breached gate counts.
    """

    seed: int
    phase: Phase
    stage: int
    metric: Metric | None
    lasted_s: float
    exposed: int
    judged: int = 0


class _Loop:
    """Replaces the control plane's loop, by storing the state and completing actions at once."""

    def __init__(self, plan: Plan) -> None:
        self.rollout = Rollout(plan)
        self.now_ms = 0

    def tell(self, event: Event) -> None:
        """Step the state machine with an event, and complete the actions that it returns."""
        result = step(self.rollout, event, self.now_ms)
        self.rollout = result.rollout
        for action in result.actions:
            if isinstance(action, Prepare):
                self.tell(Ready(action.stage))
            elif isinstance(action, RollBack):
                self.tell(SentBack())

    def restart(self) -> None:
        """Restart the loop from the stored state."""
        self.rollout = STATE.validate_json(STATE.dump_json(self.rollout))
        self.tell(Restarted())


def simulate(plan: Plan, release: SimRelease, profile: TrafficProfile, seed: int) -> RolloutOutcome:
    """Simulate the rollout of a release without operators, and return its outcome."""
    traffic, loop = Traffic(profile, seed), _Loop(plan)
    pins = {tenant_id(_PINNED_OLD): "old", tenant_id(_PINNED_NEW): "new"}
    split = ReleaseSplit("model", "old", "new", 0, f"salt-{seed}", pins)
    unread: list[Window] = []
    exposed, opened_ms, number = 0, 0, 0
    while loop.rollout.phase not in ENDED and number < _WINDOWS_MAX:
        if number == _WARM_WINDOWS:
            loop.tell(Expectations(exist=True))
            loop.tell(Start())
            opened_ms = loop.now_ms
        if split.share != loop.rollout.share:
            split = replace(split, share=loop.rollout.share)
        canary, control, served = traffic.window(split, loop.rollout.mirrored, release)
        exposed += served
        start_ms = number * _WINDOW_MS
        number += 1
        loop.now_ms = number * _WINDOW_MS
        unread.append(Window(start_ms, loop.now_ms, canary, control))
        if number % _RESTART_WINDOWS == 0:
            loop.restart()
        if len(unread) > _LAG_WINDOWS:
            loop.tell(Evidence((unread.pop(0),)))
    ended = loop.rollout
    verdict = ended.verdict
    metric, judged = (None, 0) if verdict is None else (verdict.metric, verdict.suspect.total)
    lasted_s = (loop.now_ms - opened_ms) / 1000
    return RolloutOutcome(seed, ended.phase, ended.stage, metric, lasted_s, exposed, judged)


def plan_for(alpha: float, *, is_full: bool = False, has_shadow: bool = False) -> Plan:
    """Return the default plan with the false-alarm rate `alpha`.

    Without `is_full`, each stage lasts half of its usual time. With `has_shadow`, the plan begins
    with a shadow stage.
    """
    stages = Plan().stages
    if not is_full:
        stages = tuple(
            stage.model_copy(
                update={
                    "sample_min": stage.sample_min // 2,
                    "duration_min_s": stage.duration_min_s / 2,
                }
            )
            for stage in stages
        )
    shadow = Stage(share=500, sample_min=300, is_shadow=True)
    return Plan(alpha=alpha, stages=(shadow, *stages) if has_shadow else stages)


def run(
    names: Sequence[str], plan: Plan, profile: TrafficProfile, seeds: int | None, jobs: int
) -> list[dict[str, Any]]:
    """Return the figures of scenarios, from seed 0. If `seeds` is None, its usual value is used."""
    counts = [seeds or (SEEDS_IDENTICAL if name == "identical" else SEEDS) for name in names]
    cases = [
        (name, seed) for name, count in zip(names, counts, strict=True) for seed in range(count)
    ]
    one = partial(_simulated, plan, profile)
    if jobs == 1:
        outcomes = list(starmap(one, cases))
    else:
        with ProcessPoolExecutor(jobs) as executor:
            outcomes = list(executor.map(one, *zip(*cases, strict=True), chunksize=5))
    return [
        summary(name, [o for o, case in zip(outcomes, cases, strict=True) if case[0] == name])
        for name in names
    ]


def _simulated(plan: Plan, profile: TrafficProfile, name: str, seed: int) -> RolloutOutcome:
    return simulate(plan, SCENARIOS[name], profile, seed)


def summary(name: str, outcomes: Sequence[RolloutOutcome]) -> dict[str, Any]:
    """Return the figures of a scenario from the outcomes of its seeds."""
    sent_back = [outcome for outcome in outcomes if outcome.phase is Phase.ROLLED_BACK]
    metrics = Counter(o.metric.value for o in sent_back if o.metric is not None)
    stages = Counter(outcome.stage for outcome in sent_back)
    judged = outcomes if name in GOOD else sent_back

    def spread(values: list[float]) -> dict[str, float] | None:
        if not values:
            return None
        return {"p50": percentile(values, 50), "p95": percentile(values, 95)}

    return {
        "scenario": name,
        "release": asdict(SCENARIOS[name]),
        "rollouts": len(outcomes),
        "rolled_back": len(sent_back),
        "promoted": sum(outcome.phase is Phase.DONE for outcome in outcomes),
        "metrics": dict(metrics.most_common()),
        "stages": {str(stage): stages[stage] for stage in sorted(stages)},
        "lasted_s": spread([outcome.lasted_s for outcome in judged]),
        "exposed": spread([float(outcome.exposed) for outcome in judged]),
    }


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table. Times and counts are medians and 95 % quantiles."""
    rows = [["scenario", "rollouts", "sent back", "by", "in stage", "s to the end", "exposed"]]
    for figure in figures:
        ends = [figure["lasted_s"], figure["exposed"]]
        rows.append(
            [
                figure["scenario"],
                str(figure["rollouts"]),
                str(figure["rolled_back"]),
                ", ".join(f"{key} {count}" for key, count in figure["metrics"].items()),
                ", ".join(f"{key}: {count}" for key, count in figure["stages"].items()),
                *(f"{end['p50']:,.0f} ({end['p95']:,.0f})" if end else "" for end in ends),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.rollouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--scenario", default=",".join(SCENARIOS), help="by comma, default %(default)s")
    add(
        "--seeds",
        type=int,
        help=f"of each; default {SEEDS_IDENTICAL} of identical, {SEEDS} of others",
    )
    add("--alpha", type=float, default=0.05, help="stated false-alarm rate, default %(default)s")
    usual = TrafficProfile()
    add("--rate", type=float, default=usual.rate, help="requests per second, default %(default)s")
    add("--session-spread", type=float, default=usual.session_spread, help="0: none is special")
    add("--every-turn", action="store_true", help="count all requests of a session")
    add("--full", action="store_true", help="the default plan; else stages are half as long")
    add("--edge", type=int, metavar="N", help="rollouts that are just as bad as tolerated, instead")
    add("--shadow", action="store_true", help="begin with a shadow stage")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes, default %(default)s")
    add("--json", type=Path, metavar="OUT", help="write the figures, with their parameters")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate the scenarios that the command line names, and print their figures."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    names = [name.strip() for name in arguments.scenario.split(",")]
    if unknown := set(names) - SCENARIOS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SCENARIOS)}")
    if not 0 < arguments.alpha <= 0.5 or arguments.rate <= 0:
        parser.error("alpha is above 0 and at most 0.5, the rate is above 0")
    plan = plan_for(arguments.alpha, is_full=arguments.full, has_shadow=arguments.shadow)
    profile = TrafficProfile(
        arguments.rate, arguments.session_spread, counts_every_turn=arguments.every_turn
    )
    if arguments.edge:
        accused = sum(is_accused(plan, WINDOW_S * profile.rate, n) for n in range(arguments.edge))
        print(
            f"as bad as tolerated: {accused} of {arguments.edge} accused, stated {plan.alpha:.0%}"
        )
        return
    figures = run(names, plan, profile, arguments.seeds, arguments.jobs)
    print(table(figures))
    if arguments.json:
        record = {
            "plan": plan.model_dump(mode="json"),
            "traffic": asdict(profile),
            "scenarios": figures,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
