"""Switches each rule of the router's policy off alone, and writes the table of what it is worth.

One operation replays a trace or a workload of fairness to its end on simulated replicas, by the
real router core without one rule. Goodput is of one seed. The figures of fairness are means of
three. Not measured: CPU time, real engines, networks. Without a folder of traces the run ends with
a message. Parts that are not run again keep their earlier results.
Run: `SLUICE_TRACES=FOLDER python -m benchmarks.load.ablation [--parts ...]`.
"""

import argparse
import json
import os
from collections.abc import Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.load.routing_study import (
    AZURE,
    CONVERSATION,
    PAGE,
    StudyCase,
    names,
    run_case,
    with_part,
)
from benchmarks.results import RESULTS, write_result
from sim import ablation, fairness

NAME = "ablation"
FAIRNESS = "fairness"
CASES = {
    "conversation": StudyCase("Conversation", CONVERSATION, 8, "h70", (0.95, 1.05), seeds=(0,)),
    "azure": StudyCase("Azure", AZURE, 8, "h70", (0.8, 0.95, 1.05), seeds=(0,)),
}
PARTS = (*CASES, FAIRNESS)
SCENARIOS = ("overload2", "light_vs_flood", "short_long")
SEEDS = (0, 1, 2)
_LOADS = [(part, load) for part, case in CASES.items() for load in case.loads]

# Records by part.
Records = Mapping[str, list[dict[str, Any]]]


def play_fairness(executor: Executor) -> list[dict[str, Any]]:
    """Return the records of all scenarios with all rules, and without each of them."""
    policies = ablation.policies()
    futures = {
        (name, policy): [executor.submit(fairness.play, name, policy, seed=it) for it in SEEDS]
        for name in SCENARIOS
        for policy in policies
    }
    settings = {"kv_tokens": fairness.KV_TOKENS, "cost": "m8"}
    results = [
        fairness.FairnessResult(name, policy, 1, SEEDS, tuple(it.result() for it in plays))
        for (name, policy), plays in futures.items()
    ]
    print(fairness.table(results), flush=True)
    return [result.as_json(settings) for result in results]


def recorded() -> dict[str, list[dict[str, Any]]]:
    """Return the records of the result file by part."""
    known = json.loads((RESULTS / f"{NAME}.json").read_text())["parts"]
    return {part: known.get(part, []) for part in PARTS}


def record(part: str, rows: list[dict[str, Any]]) -> None:
    """Replace the records of a part in the result file, and write the table of the docs page."""
    parts = recorded() | {part: rows}
    operation = "one trace or workload replayed to its end, without one rule of the router's policy"
    write_result(NAME, operation, {"parts": parts})
    PAGE.write_text(with_part(PAGE.read_text(), NAME, markdown(parts)))


def markdown(parts: Records) -> str:
    """Return the table for the docs, with one line per switched-off rule."""
    by_load = {(part, it["load"], it["policy"]): it for part in CASES for it in parts[part]}
    by_scenario = {(it["scenario"], it["scheduler"]): it for it in parts[FAIRNESS]}
    heads = [f"{CASES[part].title} {load:g}" for part, load in _LOADS]
    heads = ["without", *heads, "worst wait", "overload2: gap, tokens/s"]
    heads += ["light tenant: p50", "short_long: gap"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for policy in ablation.policies():
        cases = [by_load[part, load, policy] for part, load in _LOADS]
        overload, light, short = (by_scenario[name, policy] for name in SCENARIOS)
        rule = policy.removeprefix(ablation.PREFIX)
        cells = [
            "nothing" if rule == policy else f"`{rule}`",
            *(f"{it['goodput_mean']:.4f}" for it in cases),
            f"{cases[-1]['ttft_worst_ratio']:.0f}",
            f"{overload['mean_gap']:.0f}, {overload['tokens_per_s']:.0f}",
            f"{light['ttft_p50_s']:.2f} s",
            f"{short['mean_gap']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the parts, and record each of them in the result file and on the docs page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", type=names, default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    traces = os.environ.get("SLUICE_TRACES")
    if not traces:
        print("not run: set SLUICE_TRACES to the folder that holds the traces")
        return
    with ProcessPoolExecutor(arguments.jobs) as executor:
        for part in arguments.parts:
            if part == FAIRNESS:
                record(part, play_fairness(executor))
            else:
                policies = ablation.policies()
                record(part, run_case(CASES[part], Path(traces), policies, executor))


if __name__ == "__main__":
    main()
