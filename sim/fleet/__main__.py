"""Simulates a day of a whole fleet: `python -m sim.fleet --json OUT --plot OUT.png`.

All pools are simulated for a day in a fluid model, which has amounts of work instead of single
requests. The product's `plan` scales the pools, and the control plane's functions assign replicas
to cells and cells to routers. The day has flash crowds, a lost zone and replicas that become slow.

Minutes with the same kind of base, utilisation and faults are a stratum. One cell of each stratum
is simulated request by request with the real router core, with tenants and adapters. Its figures
are weighted by the stratum's requests. The results are in docs/scaling.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sim.fleet.day import KINDS, STEP_S, FleetDay, Stratum, strata_of
from sim.fleet.pools import FleetOfPools
from sim.fleet.windows import WindowFigures, capacity_rps, play, window_of

_MEANS = ("goodput", "hit_ratio", "adapter_read_share", "fairness", "tenant_least", "ttft_p50_s")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def day_of_pools(day: FleetDay) -> FleetOfPools:
    """Simulate a day's pools in the fluid model."""
    rates = {
        kind.name: capacity_rps(kind, day.adapters // day.bases, day.tenants // day.bases)
        for kind in KINDS
    }
    _note(f"requests per second of a full replica: {rates}")
    fleet = FleetOfPools(day, rates)
    steps = int(day.hours * 3600 / STEP_S)
    began_s = time.perf_counter()
    for number in range(steps):
        fleet.step(number * STEP_S)
        if number % (steps // 8 or 1) == 0:
            took_s = time.perf_counter() - began_s
            _note(f"pools: {number / steps:.0%} of the day after {took_s:.0f} s")
    return fleet


def _summary(
    day: FleetDay, fleet: FleetOfPools, played: Sequence[tuple[Stratum, WindowFigures]]
) -> dict[str, Any]:
    work = sum(pool.work * pool.kind.accelerators for pool in fleet.pools)
    late = sum(pool.late_work * pool.kind.accelerators for pool in fleet.pools)
    shares = sum(stratum.share for stratum, _ in played)
    means = {
        name: round(sum(it.share * getattr(figures, name) for it, figures in played) / shares, 4)
        for name in _MEANS
    }
    minutes = len(fleet.timeline)
    return {
        "day": asdict(day),
        "peak_rps": round(max(row["rps"] for row in fleet.timeline)),
        "requests": round(sum(moment.requests for moment in fleet.moments)),
        "requests_played": sum(figures.requests for _, figures in played),
        "share_of_requests_in_strata": round(shares, 4),
        **means,
        "ttft_p99_worst_s": round(max(figures.ttft_p99_s for _, figures in played), 3),
        "violated_pool_minutes": sum(pool.violated_minutes for pool in fleet.pools),
        "violated_pool_minutes_share": round(
            sum(pool.violated_minutes for pool in fleet.pools) / minutes / len(fleet.pools), 4
        ),
        "late_work_share": round(late / work, 4),
        "gpu_hours": round(sum(pool.gpu_s for pool in fleet.pools) / 3600),
        "gpu_hours_of_demand": round(sum(row["demand"] for row in fleet.timeline) / 60),
        "accelerators_most": round(max(row["paid"] for row in fleet.timeline)),
        "replica_moves": fleet.replica_moves,
        "cell_moves": fleet.cell_moves,
        "strata": [asdict(stratum) | asdict(figures) for stratum, figures in played],
    }


def _plot(path: Path, fleet: FleetOfPools, day: FleetDay) -> None:
    import matplotlib as mpl  # a development tool, imported when used

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    hours = [minute / 60 for minute in range(len(fleet.timeline))]
    figure, axes = plt.subplots(figsize=(10, 3.6))
    names = (("demand", "#7f8c8d"), ("paid", "#2980b9"), ("ready", "#27ae60"))
    for name, color in names:
        values = [row[name] for row in fleet.timeline]
        axes.plot(hours, values, color=color, linewidth=0.9, label=name)
    late = [at for at, row in zip(hours, fleet.timeline, strict=True) if row["violated"]]
    bottom = [0.02 * day.accelerators] * len(late)
    axes.plot(late, bottom, "|", color="#c0392b", label="a pool is violated")
    loss = fleet.demand.zone_loss
    axes.axvspan(loss.from_s / 3600, loss.until_s / 3600, color="#f5b7b1", label="zone lost")
    axes.axhline(day.accelerators, color="#34495e", linewidth=0.6, linestyle="--")
    axes.set_ylabel("accelerators")
    axes.set_xlabel("hours")
    axes.set_ylim(0, 1.2 * day.accelerators)
    axes.legend(loc="upper left", ncols=5, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _parser() -> argparse.ArgumentParser:
    defaults = FleetDay()
    parser = argparse.ArgumentParser(
        prog="python -m sim.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in fields(FleetDay):
        default = getattr(defaults, field.name)
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(default), default=default, help="default %(default)s")
    add = parser.add_argument
    add("--cell-replicas", type=int, default=64, help="of a cell in full; default %(default)s")
    add("--window-s", type=float, default=15.0, help="of a cell in full; default %(default)s")
    add("--jobs", type=int, default=1, help="processes; default %(default)s")
    add("--json", type=Path, metavar="OUT", help="file for all figures")
    add("--plot", type=Path, metavar="OUT.png", help="a picture of the day")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate the day of the command line, and print its figures."""
    parser = _parser()
    options = parser.parse_args(argv)
    day = FleetDay(**{field.name: getattr(options, field.name) for field in fields(FleetDay)})
    if day.hours < 1 or day.bases < 1 or day.adapters < day.bases or day.tenants < day.bases:
        parser.error("a day has an hour and a base at least; each base an adapter and a tenant")
    fleet = day_of_pools(day)
    strata = strata_of(fleet.moments)
    windows = [
        window_of(
            day,
            stratum,
            capacity_rps=next(
                pool.capacity_rps for pool in fleet.pools if pool.kind.name == stratum.kind
            ),
            replicas=options.cell_replicas,
            duration_s=options.window_s,
        )
        for stratum in strata
    ]
    played: list[tuple[Stratum, WindowFigures]] = []
    with ProcessPoolExecutor(options.jobs) as executor:
        for stratum, figures in zip(strata, executor.map(play, windows), strict=True):
            played.append((stratum, figures))
            _note(f"{stratum}: {figures}")
    found = _summary(day, fleet, played)
    print(json.dumps({key: it for key, it in found.items() if key != "strata"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        _plot(options.plot, fleet, day)


if __name__ == "__main__":
    main()
