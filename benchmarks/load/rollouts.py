"""Verdicts of simulated rollouts: the share of wrong ones, their time and their cost.

One operation: a rollout of the default plan from its start to its end, through the real split and
the real state machine, with made-up traffic (see docs/rollouts.md): a release that is identical, a
better one, and bad ones of several kinds. Figures: rollouts sent back, by which gate and in which
stage, virtual seconds to the end, requests that the release served. Not measured: processor time,
gateways, the time from a verdict to the last gateway. Run: `python -m benchmarks.load.rollouts`;
about nine minutes of one busy core.
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
