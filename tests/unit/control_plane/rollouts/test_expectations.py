"""What people expect of a release counts at once, and stages wait for it."""

from dataclasses import replace

from control_plane.rollouts.evidence import Arm, Metric
from control_plane.rollouts.plan import Gate
from control_plane.rollouts.state import Phase, Reason
from tests.unit.control_plane.rollouts.test_machine import PLAN, arm, running

GOLDEN = PLAN.model_copy(
    update={"gates": (*PLAN.gates, Gate(metric=Metric.GOLDEN, tolerated=0.05))}
)


def golden(right: bool) -> tuple[Arm, Arm]:
    """A window in which each release was asked twice; control always answers as expected."""
    mismatches = 0 if right else 2
    return (
        replace(arm(20), golden_runs=2, golden_mismatches=mismatches),
        replace(arm(100), golden_runs=2),
    )


def test_expected_answers_of_canary_count_from_the_first_prompt() -> None:
    life, windows = running(GOLDEN), 0
    while life.rollout.phase is Phase.RUNNING:
        life.window(*golden(right=False))
        windows += 1
    assert (life.rollout.phase, life.rollout.reason) == (Phase.HALTED, Reason.WORSE)
    assert life.rollout.verdict is not None
    assert life.rollout.verdict.metric is Metric.GOLDEN
    assert windows <= 6


def test_a_stage_waits_for_the_golden_prompts_of_its_model() -> None:
    life = running(GOLDEN)
    for _ in range(9):
        life.window(*golden(right=True))
    assert life.standing == (Phase.RUNNING, 0, 100), "18 were asked of each"
    assert life.window(*golden(right=True)).standing == (Phase.RUNNING, 1, 5_000)
    without = running(GOLDEN).windows(6)
    assert without.rollout.stage == 1, "a model without prompts does not wait"
