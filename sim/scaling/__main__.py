"""Compares scaling policies on curves of demand: `python -m sim.scaling --demand FILE ...`.

A curve has one number per line, which is the demand of a second in work-seconds. With `--step-s` a
line is the mean demand of that many seconds. A ready replica does one work-second per second.
`sluice` is the product's `plan`, and the other policies are published rules. The results are in
docs/scaling.md.
"""

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

from control_plane.scaling.fluid import ScalingOutcome, Terms, play
from sim.scaling import ramp
from sim.scaling.rules import RULES, rule_of

_LADDER_TIERS = (0.4, 0.3, 0.3)
_LADDER_SLEEPERS = 0.05


def read_curve(path: Path, step_s: int = 1) -> list[float]:
    """Return the demand of each second in a file, which is decompressed if its name ends in .gz.

    Args:
        path: File with one number per line.
        step_s: Seconds of a line.

    Raises:
        ValueError: The file cannot be read, a line is no number from 0, or the file has no line.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            steps = list(_numbers(lines))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: {told}") from None
    if not steps:
        raise ValueError(f"{path}: the file has no number")
    return [value for step in steps for value in repeat(step, step_s)]


def _numbers(lines: Iterable[str]) -> Iterable[float]:
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()):
            continue
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ValueError(f"line {number} is {text[:40]!r}, and a number from 0 is needed")
        yield value


def _record(name: str, policy: str, seed: int, outcome: ScalingOutcome) -> dict[str, Any]:
    return {
        "demand": name,
        "policy": policy,
        "seed": seed,
        "violation_minutes": outcome.violation_minutes,
        "violated_work_share": round(outcome.violated_work_share, 4),
        "gpu_hours": round(outcome.gpu_hours, 1),
        "changes": outcome.changes,
        "ttft_max_s": round(outcome.ttft_max_s, 1),
        "batch_late_share": round(outcome.batch_late_share, 4),
        "tier_minutes": list(outcome.tier_minutes),
    }


def _plot(path: Path, demand: Sequence[float], outcomes: dict[str, ScalingOutcome]) -> None:
    """Draw the demand, the paid and ready replicas, and the violated minutes of a day."""
    import matplotlib as mpl  # a development tool, imported when used

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(len(outcomes), 1, figsize=(10, 2.6 * len(outcomes)), squeeze=False)
    minutes = [sum(demand[at : at + 60]) / 60 for at in range(0, len(demand) - 59, 60)]
    hours = [at / 60 for at in range(len(minutes))]
    for axes, (policy, outcome) in zip(rows[:, 0], outcomes.items(), strict=True):
        axes.plot(hours, minutes, color="#7f8c8d", linewidth=0.8, label="demand")
        axes.plot(hours, outcome.provisioned, color="#2980b9", linewidth=0.8, label="paid for")
        axes.plot(hours, outcome.ready, color="#27ae60", linewidth=0.8, label="ready")
        late = [at for at, ttft_s in zip(hours, outcome.ttft_s, strict=True) if ttft_s > 1.5]
        axes.plot(late, [0] * len(late), "|", color="#c0392b", label="violated")
        axes.set_ylabel(policy)
    rows[0, 0].legend(loc="upper left", ncols=4, fontsize=8)
    rows[-1, 0].set_xlabel("hours")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _terms(options: argparse.Namespace) -> Terms:
    ladder = options.ladder
    if options.ramp:
        return replace(ramp.TERMS, sleepers_min=options.sleepers)
    return Terms(
        sleepers_min=options.sleepers,
        boot_s=tuple(options.boot_s),
        replicas_min=options.replicas_min,
        replicas_max=options.replicas_max,
        objective_s=options.objective_s,
        sleepers_share=_LADDER_SLEEPERS if ladder else 0.0,
        tiers=_LADDER_TIERS if ladder else (1.0,),
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def _positive(text: str) -> int:
    if not (found := _count(text)):
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return found


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Return the names of the policies. Refuse what would fail only after the simulation."""
    policies = [name for name in options.policy.split(",") if name]
    if unknown := sorted(set(policies) - set(RULES)):
        parser.error(f"no policy {', '.join(unknown)}: there are {', '.join(RULES)}")
    if not policies:
        parser.error(f"--policy names none: there are {', '.join(RULES)}")
    if options.replicas_min > options.replicas_max:
        parser.error(f"--replicas-min {options.replicas_min} is above {options.replicas_max}")
    least_s, greatest_s = options.boot_s
    if not 0 < least_s <= greatest_s < float("inf"):
        parser.error(f"--boot-s {least_s} {greatest_s}: a least and a greatest time are needed")
    if options.ramp and options.step_s != 1:
        parser.error("--step-s is for --demand")
    for path in filter(None, (options.json, options.plot)):
        if not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    return policies


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sim.scaling", description=__doc__)
    curves = parser.add_mutually_exclusive_group(required=True)
    curves.add_argument("--demand", type=Path, nargs="+", help="curves, *.gz or text")
    curves.add_argument(
        "--ramp",
        action="store_true",
        help="llm-d's staircase of 2 to 10 and 1 requests per second, with its own terms: "
        "3 to 8 replicas, ready in 100 s, 3 s to the first token",
    )
    parser.add_argument(
        "--policy",
        default=",".join(RULES),
        help=f"policies, separated by commas (default: all of {', '.join(RULES)})",
    )
    parser.add_argument("--seeds", type=_positive, default=1, help="seeds of the boot times")
    parser.add_argument(
        "--step-s", type=_positive, default=1, help="seconds of a line of --demand (default: 1)"
    )
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="tiers of 40, 30 and 30 %% (batch) of the work, in this order, and 5 %% sleepers",
    )
    parser.add_argument(
        "--boot-s", type=float, nargs=2, default=(180.0, 300.0), metavar=("MIN", "MAX")
    )
    parser.add_argument(
        "--sleepers", type=_count, default=0, help="replicas that sleep in any case; paid for"
    )
    parser.add_argument("--replicas-min", type=_positive, default=1)
    parser.add_argument("--replicas-max", type=_positive, default=400)
    parser.add_argument("--objective-s", type=float, default=1.5, help="of first tokens")
    parser.add_argument("--json", type=Path, help="write the results there, as a list")
    parser.add_argument("--plot", type=Path, help="draw the last curve there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate all policies on all curves, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    policies = _check(parser, options)
    terms = _terms(options)
    records: list[dict[str, Any]] = []
    outcomes: dict[str, ScalingOutcome] = {}
    demand: list[float] = []
    for path in options.demand or [None]:
        try:
            demand = ramp.curve() if path is None else read_curve(path, options.step_s)
        except ValueError as error:
            parser.error(str(error))
        for policy in policies:
            for seed in range(options.seeds):
                if path is None:
                    demand = ramp.curve(seed)
                outcomes[policy] = play(demand, rule_of(policy, terms, demand), terms, seed)
                name = "ramp" if path is None else path.name
                records.append(_record(name, policy, seed, outcomes[policy]))
                if path is None:
                    records[-1]["replicas_mean"] = round(ramp.replicas_mean(outcomes[policy]), 2)
                print(json.dumps(records[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    if options.plot:
        _plot(options.plot, demand, outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
