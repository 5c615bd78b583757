"""Measures the CPU time of a scaling plan of 200 pools.

One operation is one `plan` of 200 pools. Each pool has half an hour of buckets, eight days of
quarter-hours and the boot times of 16 replicas. `within` is the same plan under a budget that
reduces half of the pools. Figures are milliseconds of CPU time. Not measured: the database.
Run: `python -m benchmarks.micro.scaling_plan`.
"""

import json
import random
import statistics
import time

from benchmarks.results import write_result
from control_plane.scaling.model import FleetBudget, PoolFacts, PoolState, ScalingSettings
from control_plane.scaling.plan import plan

_POOLS = 200
_ROUNDS = 40
_NOW_S = 1200.0


def _state(drawn: random.Random) -> PoolState:
    settings = ScalingSettings(replicas_min=1, replicas_max=64, accelerators=8)
    state = PoolState(settings, PoolFacts(ready=8, booting=1, backlog_work_s=5.0))
    for _ in range(800):
        state.history.add(20 * drawn.lognormvariate(0, 0.1))
    state.history.days.extend([20.0] * 768)
    state.asks = [(900.0 + 15 * number, 20.0) for number in range(20)]
    for _ in range(16):
        state.booted(drawn.uniform(180, 300))
    return state


def main() -> None:
    """Measure, print and write the result."""
    drawn = random.Random(0)
    states = {str(number): _state(drawn) for number in range(_POOLS)}
    figures: dict[str, dict[str, float]] = {}
    for name, budget in (
        ("open", FleetBudget()),
        ("within", FleetBudget(accelerators=_POOLS * 8 * 10)),
    ):
        rounds: list[float] = []
        for _ in range(_ROUNDS):
            began_s = time.process_time()
            plan(states, budget, _NOW_S)
            rounds.append(1000 * (time.process_time() - began_s))
        figures[name] = {
            "best_ms": round(min(rounds), 1),
            "median_ms": round(statistics.median(rounds), 1),
        }
    print(json.dumps(figures))
    write_result("scaling_plan", " ".join((__doc__ or "").split()), {"pools": _POOLS, **figures})


if __name__ == "__main__":
    main()
