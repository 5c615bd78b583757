"""Compares the real router core with peers' policies on published traces, in simulation.

One operation replays a trace to its end on simulated replicas with one policy. The figures are
means of goodput, TTFT, TPOT and hit ratio over four seeds. Cost models compute the times of steps
(see docs/routing-study.md). The peers are policies of other platforms. They have exact and
immediate state, while the router core has reports that are 100 ms old and an index that is 3 s old.
Not measured: CPU time, real engines, networks. Without a folder of traces the run ends with a
message. Cases that are not run again keep their earlier results.
Run: `SLUICE_TRACES=FOLDER python -m benchmarks.load.routing_study [--cases ...] [--policies ...]`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, write_result
from sim import plots, routing
from sim.runs import SYNTHETIC, Run, RunSource, capacity

NAME = "routing_study"
DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "routing-study.md"
SEEDS = (0, 1, 2, 3)
# One of 80 cells of a fleet with 100,000 requests/s. The cell gets 1,250 requests/s, for 60 s.
FLEET_CELL = ("requests=75000,rate=1250,prompt=150,prompt_sigma=0.8,output=40", "synthetic")
CONVERSATION = ("mooncake_conversation_trace.jsonl.gz", "mooncake")
AZURE = ("azure2023_conv.csv.gz", "azure")
COMPARED = ("sluice", "dynamo_best", "oracle")
# Goodput in the simulator that was published with the traces (seed 0, load 0.95, 8 replicas).
REFERENCE = {
    "oracle": 0.996,
    "dynq_16_0_wspt": 0.969,
    "dynamo_kv_pls16": 0.928,
    "dynamo_kv_pls4": 0.892,
    "dynamo_kv": 0.803,
    "preble_e2": 0.757,
    "llmd_predlat": 0.724,
    "aibrix_prefix_cache": 0.719,
    "session_sticky": 0.699,
    "llmd_precise": 0.696,
    "llmd_default": 0.678,
    "sglang_cache_aware_old": 0.668,
    "least_requests": 0.653,
    "sglang_cache_aware": 0.633,
    "least_tokens": 0.623,
    "chwbl": 0.553,
    "power_of_two": 0.517,
    "round_robin": 0.377,
    "random": 0.277,
}


@dataclass(frozen=True, slots=True)
class StudyCase:
    """One table of the study.

    Attributes:
        title: Title in the docs.
        trace: File name and format, or settings of a generated workload.
        loads: Loads as shares of capacity, empty if `rate_per_s` is set.
        options: Further options of `Run`.
        has_picture: Whether a picture is drawn for the docs.
        rate_per_s: Requests per second, or 0 if `loads` are set.
        seeds: Seeds of the runs.
    """

    title: str
    trace: tuple[str, str]
    replicas: int
    cost: str
    loads: tuple[float, ...]
    policies: tuple[str, ...] = COMPARED
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    has_picture: bool = False
    rate_per_s: float = 0.0
    seeds: tuple[int, ...] = SEEDS


CASES = {
    "conversation-8": StudyCase(
        "Conversation trace, 8 replicas, H70",
        CONVERSATION, 8, "h70", (0.8, 0.95, 1.05), has_picture=True,
    ),
    "azure-8": StudyCase(
        "Azure conversation trace, 8 replicas, M8",
        AZURE, 8, "m8", (0.8, 0.95, 1.05), has_picture=True,
    ),
    "conversation-32": StudyCase(
        "Conversation trace, 32 replicas, H70", CONVERSATION, 32, "h70", (0.95, 1.05)
    ),
    "azure-32": StudyCase(
        "Azure conversation trace, 32 replicas, M8", AZURE, 32, "m8", (0.95, 1.05)
    ),
    "conversation-12-uneven": StudyCase(
        "Conversation trace, 12 replicas of uneven speed (0.85-1.15), index 10 s old",
        CONVERSATION, 12, "h70", (0.95,),
        options={"speed_spread": 0.15, "index_delay_s": 10.0},
    ),
    "azure-24-uneven": StudyCase(
        "Azure conversation trace, 24 replicas of uneven speed (0.85-1.15)",
        AZURE, 24, "m8", (0.95,), options={"speed_spread": 0.15},
    ),
    "conversation-8-fault": StudyCase(
        "Conversation trace, 8 replicas, one lost at 400 s, one added at 700 s",
        CONVERSATION, 8, "h70", (0.8,), options={"lose_at_s": 400.0, "add_at_s": 700.0},
    ),
    "cells-1": StudyCase(
        "Conversation trace, 64 replicas in one cell",
        CONVERSATION, 64, "h70", (0.95,), policies=("sluice",),
    ),
    "cells-8": StudyCase(
        "Conversation trace, 64 replicas in eight cells",
        CONVERSATION, 64, "h70", (0.95,), policies=("sluice",), options={"cells": 8},
    ),
    "fleet-cell": StudyCase(
        "One of 80 cells of a fleet of 1,250 replicas that gets 100,000 requests/s, for 60 s",
        FLEET_CELL, 16, "m8", (), policies=("sluice",), rate_per_s=1250.0, seeds=(0, 1),
    ),
    "peers": StudyCase(
        "All policies: conversation trace, 8 replicas, H70, load 0.95",
        CONVERSATION, 8, "h70", (0.95,), policies=("sluice", *REFERENCE), has_picture=True,
    ),
}  # fmt: skip


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_case(
    case: StudyCase, traces: Path, policies: Sequence[str], executor: Executor | None
) -> list[dict[str, Any]]:
    """Return the records of the policies at every load of a case."""
    name, format_name = case.trace
    is_file = format_name != SYNTHETIC
    base = Run(
        source=RunSource(str(traces / name) if is_file else name, format_name),
        replicas=case.replicas,
        cost=case.cost,
        load=0.0,
        policy="",
        **case.options,
    )
    loads = case.loads
    if case.rate_per_s:
        loads = (round(case.rate_per_s / capacity(base.source, base.replicas, base.cost), 4),)
    results = routing.compare(base, policies, loads, case.seeds, executor)
    print(routing.table(results), flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    shown = name.partition(".")[0].removesuffix("_trace") if is_file else format_name
    return [result.as_json(shown) | {"commit": commit} for result in results]


def merge(
    known: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], case: StudyCase
) -> list[dict[str, Any]]:
    """Return the old and new records of a case, sorted. A new record replaces its old version."""
    records = {(record["load"], record["policy"]): record for record in (*known, *new)}
    loads = case.loads or sorted({record["load"] for record in new or known})
    wanted = ((load, policy) for load in loads for policy in case.policies)
    return [records[key] for key in wanted if key in records]


def recorded() -> dict[str, list[dict[str, Any]]]:
    """Return the records of the result file by case, in the order of the cases."""
    path = RESULTS / f"{NAME}.json"
    known = json.loads(path.read_text())["cases"] if path.exists() else {}
    return {name: known.get(name, []) for name in CASES}


def record(name: str, new: Sequence[dict[str, Any]]) -> None:
    """Add records of a case to the file, after reading other processes' changes of the file."""
    cases = recorded()
    cases[name] = merge(cases[name], new, CASES[name])
    operation = "one trace replayed to its end; goodput and times are of simulated engines"
    write_result(NAME, operation, {"cases": cases})


def markdown(name: str, case: StudyCase, records: Sequence[dict[str, Any]]) -> str:
    """Return a case as a table for the docs."""
    has_reference = name == "peers"
    lines = [
        f"### {case.title}\n",
        "| policy | load | goodput (min-max) | TTFT p50 / p90 / p99, s | longest tenth p99, s |"
        " worst / objective | TPOT p99, ms | hit ratio |"
        + (" reference |" if has_reference else ""),
        "| --- " * (9 if has_reference else 8) + "|",
    ]
    for record in records:
        goodputs, ttft = record["goodput_by_seed"], record["ttft_s"]
        policy, winner = record["policy"], record["settings"]["winner"]
        shown = policy if winner == policy else f"{policy}: {winner}"
        line = (
            f"| {shown} | {record['load']:g} | {record['goodput_mean']:.3f}"
            f" ({min(goodputs):.3f}-{max(goodputs):.3f}) | {ttft['p50']:.2f} / {ttft['p90']:.2f} /"
            f" {ttft['p99']:.2f} | {record['ttft_longest_decile_p99_s']:.1f} |"
            f" {record['ttft_worst_ratio']:.1f} | {record['tpot_ms']['p99']:.0f} |"
            f" {record['hit_ratio']:.3f} |"
        )
        if has_reference:
            known = REFERENCE.get(policy)
            line += f" {known:.3f} |" if known is not None else " |"
        lines.append(line)
    if case.has_picture:
        lines.append(f"\n![{case.title}](images/routing-{name}.png)")
    return "\n".join(lines)


def with_part(page: str, name: str, part: str) -> str:
    """Return a page with a new part between the two comment lines of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    return f"{page.partition(begin)[0]}{begin}\n{part}\n{end}{page.partition(end)[2]}"


def write_page(cases: dict[str, list[dict[str, Any]]]) -> None:
    """Write tables and pictures into docs/routing-study.md, between its two comment lines."""
    tables = "\n\n".join(markdown(name, CASES[name], rows) for name, rows in cases.items() if rows)
    PAGE.write_text(with_part(PAGE.read_text(), "results", tables))
    (DOCS / "images").mkdir(exist_ok=True)
    for name, rows in cases.items():
        if rows and CASES[name].has_picture:
            plots.compare(rows, DOCS / "images" / f"routing-{name}.png")


def names(text: str) -> list[str]:
    """Return the names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",")]


def main() -> None:
    """Run the cases, record them and write the docs page anew."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load.routing_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=names, default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--policies", type=names, help="only these, where a case has them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--page-only", action="store_true", help="write the docs page, run nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - CASES.keys():
        parser.error(f"unknown case {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if arguments.page_only:
        write_page(recorded())
        return
    traces = os.environ.get("SLUICE_TRACES")
    if not traces:
        print("not run: set SLUICE_TRACES to the folder that holds the traces")
        return
    with ProcessPoolExecutor(arguments.jobs) as executor:
        for name in arguments.cases:
            case = CASES[name]
            policies = [p for p in case.policies if p in (arguments.policies or case.policies)]
            if policies:
                _note(f"== {name}: {', '.join(policies)}")
                record(name, run_case(case, Path(traces), policies, executor))
    write_page(recorded())


if __name__ == "__main__":
    main()
