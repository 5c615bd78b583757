"""Measures cache hits and TTFT of prompts without a session in a pool with several cells.

`python -m sim.prefix_cells --cells 2,4,8` simulates conversations with common system prompts. No
conversation has a session, and the replicas are divided among the cells. Gateways choose cells by
the product's sketches (`sketches`), by an exact index over all cells (`exact`), or without an index
(`affinity`). `one` is a pool with a single cell. `--mooncake FILE` replays the prompts of that
trace instead, cut into blocks of 32 tokens. The results are in docs/routing.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from replica.drivers.sim_costs import MODELS_BY_NAME
from router.core.fleet.prefix_sketch import MARKS_MAX
from sim import synthetic, traces
from sim.metrics import measure
from sim.policies.cell_knowledge import CellKnowledge
from sim.policies.sluice import RouterSettings, Sluice
from sim.pool import SimPool, SimPoolPlan
from sim.workload import Trace
from sluice.hashing import BLOCK_TOKENS

_ONE = "one"
_KNOWLEDGE = (*CellKnowledge, _ONE)
_CHAT = synthetic.Synthetic(
    rate=4.0, prompt=150.0, output=200.0, turns=4.0, systems=40, system_tokens=640
)


@dataclass(frozen=True, slots=True)
class PrefixCase:
    """The settings of one simulated run.

    Attributes:
        knowledge: Data of gateways about cells, as a `CellKnowledge`, or `one` for a single cell.
        cells: Number of cells.
        replicas: Number of replicas of all cells together.
        load: Requests per second and replica.
        seed: Seed of the conversations.
        requests: Number of requests.
        marks_max: Greatest number of marks in one generation of a sketch.
        mooncake: Path of a trace file, or empty for synthetic conversations.
    """

    knowledge: str
    cells: int
    replicas: int
    load: float
    seed: int
    requests: int
    marks_max: int = MARKS_MAX
    mooncake: str = ""


@dataclass(frozen=True, slots=True)
class PrefixFigures:
    """The figures of a run.

    Attributes:
        hit_ratio: Share of prompt tokens that were cached.
        ttft_p50_s: Median of the time to the first token, in seconds.
        ttft_p99_s: 99th percentile of the time to the first token, in seconds.
        goodput: Share of requests within the objectives.
        took_s: Processor seconds of the run.
    """

    hit_ratio: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput: float
    took_s: float


@lru_cache(maxsize=2)
def trace_of(mooncake: str, requests: int, seed: int) -> Trace:
    """Return requests without sessions, in blocks of 32 tokens."""
    if mooncake:
        trace = traces.load(Path(mooncake), "mooncake", seed=seed, requests_max=requests)
        trace = _cut(trace)
    else:
        workload = replace(_CHAT, requests=requests)
        trace = synthetic.generate(workload, seed=seed, block_tokens=BLOCK_TOKENS)
    bare = tuple(replace(request, session=-1) for request in trace.requests)
    return replace(trace, requests=bare)


def _cut(trace: Trace) -> Trace:
    """Return a trace with its blocks cut into blocks of 32 tokens."""
    parts = trace.block_tokens // BLOCK_TOKENS
    requests = tuple(
        replace(
            request,
            blocks=tuple(parts * block + part for block in request.blocks for part in range(parts))[
                : -(-request.prompt_tokens // BLOCK_TOKENS)
            ],
        )
        for request in trace.requests
    )
    return Trace(trace.name, BLOCK_TOKENS, requests)


def figures_of(case: PrefixCase) -> PrefixFigures:
    """Simulate a case to its end, and return its figures."""
    began_s = time.process_time()
    is_one = case.knowledge == _ONE
    settings = RouterSettings(
        cells=1 if is_one else case.cells,
        knowledge=CellKnowledge.SKETCHES if is_one else CellKnowledge(case.knowledge),
        marks_max=case.marks_max,
    )
    trace = trace_of(case.mooncake, case.requests, case.seed)
    plan = SimPoolPlan(case.replicas, seed=case.seed)
    pool = SimPool(Sluice(settings), MODELS_BY_NAME["h70"], plan, block_tokens=BLOCK_TOKENS)
    pool.run(trace, trace.time_factor(case.load * case.replicas))
    found = measure(pool)
    took_s = time.process_time() - began_s
    return PrefixFigures(found.hit_ratio, found.ttft_p50_s, found.ttft_p99_s, found.goodput, took_s)


def _table(rows: Sequence[tuple[PrefixCase, PrefixFigures]]) -> str:
    lines = [
        "| cells | load | knowledge | hit ratio | TTFT p50 | p99 | goodput |",
        "|---" * 7 + "|",
    ]
    groups: dict[tuple[int, float, str], list[PrefixFigures]] = {}
    for case, figures in rows:
        groups.setdefault((case.cells, case.load, case.knowledge), []).append(figures)
    for (cells, load, knowledge), found in groups.items():
        hit, p50, p99, good = (
            sum(values) / len(found)
            for values in zip(
                *((it.hit_ratio, it.ttft_p50_s, it.ttft_p99_s, it.goodput) for it in found),
                strict=True,
            )
        )
        lines.append(
            f"| {cells} | {load:g} | {knowledge} | {hit:.4f} | {p50 * 1e3:.0f} ms | {p99:.2f} s"
            f" | {good:.4f} |"
        )
    return "\n".join(lines)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.prefix_cells",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cells", type=_numbers, default=[2, 4, 8], help="by comma; default 2,4,8")
    add("--replicas", type=int, default=16, help="of all cells; default %(default)s")
    add("--knowledge", default=",".join(_KNOWLEDGE), help="by comma; default %(default)s")
    add("--loads", default="0.5,1.5", help="requests per second and replica; default %(default)s")
    add("--seeds", type=_numbers, default=[0], help="by comma; default 0")
    add("--requests", type=int, default=4000, help="default %(default)s")
    add("--marks-max", type=int, default=MARKS_MAX, help="of a sketch; default %(default)s")
    add("--mooncake", default="", metavar="FILE", help="trace in Mooncake's format")
    add("--jobs", type=int, default=1, help="processes; default %(default)s")
    add("--json", type=Path, metavar="OUT", help="file for the figures of all runs")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate the cases of the command line, and print their figures."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    knowledge = arguments.knowledge.split(",")
    if not set(knowledge) <= set(_KNOWLEDGE):
        parser.error(f"--knowledge is of {', '.join(_KNOWLEDGE)}")
    if min(arguments.cells) < 2 or max(arguments.cells) > arguments.replicas:
        parser.error("--cells are at least 2, and at most as many as --replicas")
    loads = [float(word) for word in arguments.loads.split(",")]
    cases = [
        PrefixCase(
            *(what, cells, arguments.replicas, load, seed, arguments.requests),
            *(arguments.marks_max, arguments.mooncake),
        )
        for cells, load, what, seed in product(arguments.cells, loads, knowledge, arguments.seeds)
    ]
    rows: list[tuple[PrefixCase, PrefixFigures]] = []
    with ProcessPoolExecutor(arguments.jobs) as executor:
        for case, figures in zip(cases, executor.map(figures_of, cases), strict=True):
            rows.append((case, figures))
            print(f"{case}: {figures}", file=sys.stderr, flush=True)
    print(_table(rows))
    if arguments.json:
        found = [asdict(case) | asdict(figures) for case, figures in rows]
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
