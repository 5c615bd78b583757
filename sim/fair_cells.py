"""Measures a tenant's share of service in several cells: `python -m sim.fair_cells --cells 2,4,8`.

Each cell has one replica and a separate router core. The tenant `wide` sends requests to all cells,
each tenant `narrow-N` only to cell N. Every tenant sends more than can be served. With one count
per pool, each tenant receives 1 / (cells + 1) of all service. Cells report service to one another
like routers, with the delay of `--age-s`. With `own`, each cell counts only its own service. The
results are in docs/fairness.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from sim.engines import Job
from sim.fairness import BLOCK, KV_TOKENS, Load, Services, SmallM8, trace_of
from sim.policies.sluice import RouterSettings, Sluice
from sim.pool import SimPool, SimPoolPlan

WIDE = "wide"
WARM_UP_S = 40.0
# Requests per second of a tenant in each cell, while a replica serves 0.95 per second.
_NARROW_RATE, _WIDE_RATE = 1.0, 0.6
_PROMPT, _OUTPUT = 1500, 500
_OWN = "own"


@dataclass(frozen=True, slots=True)
class FairCase:
    """The settings of one simulated run.

    Attributes:
        cells: Number of cells, with one replica each.
        age_s: Greatest age in seconds of a cell's data about the service of other cells, or None if
            each cell counts only its own service.
        seed: Seed of arrivals and lengths.
        duration_s: Seconds of arrivals. The share is measured from `WARM_UP_S` on.
    """

    cells: int
    age_s: float | None
    seed: int
    duration_s: float


class PinnedSluice(Sluice):
    """The router core, with gateways that send `narrow-N` to cell N and `wide` to all cells."""

    def choose_cell(self, job: Job) -> int:
        """Return the cell of a narrow tenant, or the next cell of a cycle for the wide tenant."""
        _, _, cell = job.request.tenant.partition("-")
        return int(cell) if cell else job.number % self.settings.cells


def loads(case: FairCase) -> tuple[Load, ...]:
    """Return the arrivals of the tenants of a case."""
    periods = ((0.0, case.duration_s),)
    names = (f"narrow-{cell}" for cell in range(case.cells))
    narrow = (Load(name, _NARROW_RATE, _PROMPT, _OUTPUT, periods) for name in names)
    return (Load(WIDE, _WIDE_RATE * case.cells, _PROMPT, _OUTPUT, periods), *narrow)


def wide_share(case: FairCase) -> float:
    """Return the service of the wide tenant, as a multiple of its fair share of all service."""
    settings = RouterSettings(cells=case.cells, service_age_s=case.age_s)
    plan = SimPoolPlan(case.cells, seed=case.seed, kv_tokens=KV_TOKENS)
    pool = SimPool(PinnedSluice(settings), SmallM8(), plan, block_tokens=BLOCK)
    trace = trace_of("cells", loads(case), case.seed)
    end_s = pool.run(trace)
    served = Services(pool.jobs, end_s).served(int(WARM_UP_S), int(case.duration_s))
    return served[WIDE] / sum(served.values()) * len(served)


def _timed(case: FairCase) -> tuple[float, float]:
    began_s = time.process_time()
    return wide_share(case), time.process_time() - began_s


def table(shares: dict[tuple[int, float | None], list[float]]) -> str:
    """Return the mean shares as a table for the docs, with a row per number of cells."""
    ages = list(dict.fromkeys(age for _, age in shares))
    names = ["each by itself" if age is None else f"age {age:g} s" for age in ages]
    lines = [f"| cells | {' | '.join(names)} |", "| --- " * (len(ages) + 1) + "|"]
    for cells in dict.fromkeys(cells for cells, _ in shares):
        means = (sum(shares[cells, age]) / len(shares[cells, age]) for age in ages)
        lines.append(f"| {cells} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return "\n".join(lines)


def _ages(text: str) -> list[float | None]:
    return [None if word == _OWN else float(word) for word in text.split(",")]


def _counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.fair_cells",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cells", type=_counts, default=[2, 4, 8], help="by comma; default 2,4,8")
    add("--age-s", type=_ages, default=_ages("own,0.1,0.3,1"), help="default own,0.1,0.3,1")
    add("--seeds", type=_counts, default=[0], help="by comma; default 0")
    add("--duration-s", type=float, default=200.0, help="of arrivals; default %(default)g")
    add("--jobs", type=int, default=1, help="processes; default %(default)s")
    add("--json", type=Path, metavar="OUT", help="file for the shares of all seeds")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases that the command line names, and print their shares."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if min(arguments.cells) < 2 or arguments.duration_s <= WARM_UP_S:
        parser.error(f"--cells are at least 2, --duration-s is above {WARM_UP_S:g}")
    cases = [
        FairCase(cells, age_s, seed, arguments.duration_s)
        for cells, age_s, seed in product(arguments.cells, arguments.age_s, arguments.seeds)
    ]
    shares: dict[tuple[int, float | None], list[float]] = {}
    with ProcessPoolExecutor(arguments.jobs) as executor:
        for case, (share, took_s) in zip(cases, executor.map(_timed, cases), strict=True):
            shares.setdefault((case.cells, case.age_s), []).append(share)
            print(f"{case}: {share:.4f} ({took_s:.0f} s)", file=sys.stderr, flush=True)
    print(table(shares))
    if arguments.json:
        found = [
            {**asdict(FairCase(cells, age_s, 0, arguments.duration_s)), "shares": by_seed}
            for (cells, age_s), by_seed in shares.items()
        ]
        for row in found:
            row["seeds"] = arguments.seeds
            del row["seed"]
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
