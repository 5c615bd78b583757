"""Replica faults against the real router: `python -m sim.faults --replicas 8 --plan kill,slow`.

Each run submits a seeded workload to a pool of simulated hosts, and breaks and heals one host. The
reported effects on clients are lost or doubled requests, wrong tokens, and the longest pause of a
stream. The report also has the seconds until the router detected the fault, and until it used the
replica again. The router's shell, attachments and core are the real code, and time is virtual.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from sim.fault_world import FAULTS, SILENCE_S, FaultReport, FaultScenario, simulate

PLANS = ("none", *FAULTS)
_COLUMNS = ("requests", "lost", "doubled", "wrong", "late", "resumed", "pause", "ttft p99", "seen")


def summary(reports: Sequence[FaultReport]) -> dict[str, Any]:
    """Return the figures of one fault over its seeds, as sums of counts and the largest times."""
    seen = [report.detect_s for report in reports if report.detect_s is not None]
    back = [report.back_s for report in reports if report.back_s is not None]
    return {
        "requests": sum(report.requests for report in reports),
        "lost": sum(report.lost for report in reports),
        "duplicated": sum(report.duplicated for report in reports),
        "wrong_tokens": sum(report.wrong_tokens for report in reports),
        "wrong_tokens_after_detection": sum(report.wrong_later for report in reports),
        "resumed": sum(report.resumed for report in reports),
        "pause_max_s": round(max(report.pause_s for report in reports), 4),
        "ttft_p99_max_s": round(max(report.ttft_p99_s for report in reports), 4),
        "detected": len(seen),
        "detect_max_s": round(max(seen), 4) if seen else None,
        "back_max_s": round(max(back), 4) if back else None,
        "ejected": sorted({reason for report in reports for reason in report.ejected}),
        "by_seed": [asdict(report) for report in reports],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return exit status 1 if a request was lost or doubled, else 0."""
    options = _options(arguments)
    plans: dict[str, Any] = {}
    print(" ".join(f"{name:>8}" for name in ("plan", *_COLUMNS, "back")), "ejected")
    for plan in options.plan:
        reports = [
            simulate(FaultScenario(plan, seed, options.replicas, options.rate))
            for seed in options.seeds
        ]
        plans[plan] = figures = summary(reports)
        print(_line(plan, figures), flush=True)
    if options.json is not None:
        settings = {"replicas": options.replicas, "seeds": options.seeds, "rate": options.rate}
        result = {"settings": settings | {"silence_s": SILENCE_S}, "plans": plans}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    broken = sum(figures["lost"] + figures["duplicated"] for figures in plans.values())
    return 1 if broken else 0


def _line(plan: str, figures: dict[str, Any]) -> str:
    names = (
        *("requests", "lost", "duplicated", "wrong_tokens", "wrong_tokens_after_detection"),
        *("resumed", "pause_max_s", "ttft_p99_max_s", "detect_max_s", "back_max_s"),
    )
    cells = ["-" if figures[name] is None else str(figures[name]) for name in names]
    row = " ".join(f"{cell:>8}" for cell in (plan, *cells))
    return f"{row} {','.join(figures['ejected']) or '-'}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sim.faults", description=__doc__)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument(
        "--plan",
        type=_plans,
        default=list(PLANS),
        help=f"by comma, of {', '.join(PLANS)} (default: all)",
    )
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2, 3], help="by comma")
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(arguments)


def _plans(text: str) -> list[str]:
    plans = text.split(",")
    unknown = [plan for plan in plans if plan not in PLANS]
    if unknown:
        message = f"unknown: {', '.join(unknown)}; there are {', '.join(PLANS)}"
        raise argparse.ArgumentTypeError(message)
    return plans


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    sys.exit(main())
