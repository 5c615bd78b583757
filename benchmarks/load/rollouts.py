"""Measures simulated rollouts: how often, how fast and after how many requests they roll back.

One operation is a rollout of the default plan from its start to its end. The traffic split and the
state machine are the real code, and the traffic is generated (see docs/rollouts.md). The release is
identical, better, or bad in one of several ways. Figures are the number of rollbacks by gate and
stage, the simulated seconds to the end, and the number of requests that the release served. Not
measured: CPU time, gateways, the time from a verdict to the last gateway. The run needs about nine
minutes of one core. Run: `python -m benchmarks.load.rollouts`.
"""

import os
from dataclasses import asdict

from benchmarks.results import write_result
from sim.rollout_traffic import TrafficProfile
from sim.rollouts import SCENARIOS, plan_for, run, table

ALPHA = 0.05


def main() -> None:
    """Simulate every scenario and write the figures."""
    plan, profile = plan_for(ALPHA, is_full=True), TrafficProfile()
    figures = run(tuple(SCENARIOS), plan, profile, None, os.cpu_count() or 1)
    print(table(figures))
    write_result(
        "rollouts",
        "a simulated rollout from start to end; gateways and processor time not measured",
        {
            "plan": plan.model_dump(mode="json"),
            "traffic": asdict(profile),
            "scenarios": figures,
        },
    )


if __name__ == "__main__":
    main()
