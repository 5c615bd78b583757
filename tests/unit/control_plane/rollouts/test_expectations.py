"""What people expect of a release counts at once, and stages wait for it."""

from dataclasses import replace

import pytest

from control_plane.rollouts.evidence import Arm, Metric
from control_plane.rollouts.plan import Gate, Plan
from control_plane.rollouts.shown import details
from control_plane.rollouts.state import Expectations, Phase, Promote, Reason
from tests.unit.control_plane.rollouts.test_machine import PLAN, Life, arm, running

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


def asked(plan: Plan = GOLDEN) -> Life:
    """A rollout in its first stage, of a model with golden prompts."""
    return running(plan).tell(Expectations(exist=True))


def one_arm(*, is_canary: bool) -> tuple[Arm, Arm]:
    """A window in which only one release had its turn."""
    return (
        replace(arm(20), golden_runs=int(is_canary)),
        replace(arm(100), golden_runs=int(not is_canary)),
    )


def test_a_stage_waits_for_the_golden_prompts_of_its_model() -> None:
    life = asked()
    for _ in range(9):
        life.window(*golden(right=True))
    assert life.standing == (Phase.RUNNING, 0, 100), "18 were asked of each"
    assert life.window(*golden(right=True)).standing == (Phase.RUNNING, 1, 5_000)
    without = running(GOLDEN).windows(6)
    assert without.rollout.stage == 1, "a model without prompts does not wait"


def test_no_stage_passes_unasked() -> None:
    life = asked().windows(25)
    assert life.standing == (Phase.RUNNING, 0, 100), "its time and traffic were enough long ago"
    life.tell(Expectations(exist=False))
    assert life.rollout.stage == 1, "its prompts were removed"
    life.windows(5).tell(Expectations(exist=True))
    last = life.windows(6).rollout
    assert last.stage == 1, "they are waited for from the moment of their addition"
    for _ in range(10):
        life.window(*golden(right=True))
    assert life.rollout.stage == 2
    assert life.windows(10).rollout.phase is Phase.RUNNING, "the last stage waits, too"
    for _ in range(10):
        life.window(*golden(right=True))
    assert life.rollout.phase is Phase.DONE


@pytest.mark.parametrize("when_short", ["pause", "go_on", "roll_back"])
def test_unanswered_prompts_end_a_stage_by_no_plan(when_short: str) -> None:
    life = asked(Plan.model_validate(GOLDEN.model_dump() | {"when_short": when_short}))
    life.windows(31)
    phase = Phase.HALTED if when_short == "roll_back" else Phase.PAUSED
    assert (life.rollout.phase, life.rollout.reason) == (phase, Reason.UNASKED)
    if phase is Phase.PAUSED:
        assert life.tell(Promote(0)).rollout.stage == 1, "an operator may"


def test_releases_that_are_asked_in_turn_are_compared() -> None:
    long = GOLDEN.stages[0].model_copy(update={"duration_max_s": 1_000.0})
    life = asked(GOLDEN.model_copy(update={"stages": (long, *GOLDEN.stages[1:])}))
    for _ in range(19):
        life.window(*one_arm(is_canary=True)).window(*one_arm(is_canary=False))
    assert life.rollout.golden_sample == (19, 1)
    life.window(*one_arm(is_canary=True)).window(*one_arm(is_canary=False))
    assert life.rollout.stage == 1


def test_a_stage_tells_the_golden_prompts_that_it_waits_for() -> None:
    life = asked().windows(6)
    found = details(life.rollout)
    assert found["waiting_for"] == (
        "20 answers of each release to golden prompts (none yet: sluice golden results says why)"
    )
    assert found["stage_left_s"] is None
    for _ in range(3):
        life.window(*golden(right=True))
    found = details(life.rollout)
    assert found["waiting_for"] == "14 answers of each release to golden prompts"
    assert found["stage_left_s"] == 14 * 90 / 6


def test_a_plan_without_the_gate_waits_for_no_prompt() -> None:
    assert running(PLAN).tell(Expectations(exist=True)).windows(6).rollout.stage == 1
