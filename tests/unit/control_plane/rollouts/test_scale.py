"""What slow is to a rollout: the scale comes from control, and follows it."""

from control_plane.rollouts.evidence import Metric
from control_plane.rollouts.plan import Stage
from control_plane.rollouts.state import Phase, Start
from tests.unit.control_plane.rollouts.test_machine import PLAN, Life, arm, running


def test_slowness_is_measured_against_control_before_the_stage():
    life = running()
    while life.rollout.phase is Phase.RUNNING:
        life.window(canary=arm(20, ttft_bucket=36))
    assert life.rollout.verdict is not None
    assert life.rollout.verdict.metric is Metric.SLOW_FIRST_TOKEN
    everybody = running()
    for _ in range(5):
        everybody.window(canary=arm(20, ttft_bucket=36), control=arm(100, ttft_bucket=36))
    assert everybody.rollout.phase is Phase.RUNNING


def test_without_a_past_the_scale_is_that_of_the_first_windows():
    life = Life().tell(Start())
    assert life.rollout.thresholds.ttft_ms_high is None
    life.windows(2)
    assert life.rollout.thresholds.ttft_ms_high == 30
    assert life.rollout.tests[Metric.SLOW_FIRST_TOKEN].canary.total == 0
    life.windows(2)
    assert life.rollout.tests[Metric.SLOW_FIRST_TOKEN].canary.total == 40


def test_slowness_is_found_though_control_was_slower_yet_when_the_stage_opened():
    """As it is where replicas of the new release start beside it, and load their weights."""
    stages = (Stage(share=100, duration_min_s=9_999.0), *PLAN.stages[1:])
    patient = PLAN.model_copy(update={"stages": stages})
    life = Life(patient).tell(Start())
    for _ in range(2):
        life.window(canary=arm(20, ttft_bucket=40), control=arm(100, ttft_bucket=40))
    assert life.rollout.thresholds.ttft_ms_high == 40
    for _ in range(40):
        if life.rollout.phase is Phase.RUNNING:
            life.window(canary=arm(20, ttft_bucket=36))
    assert life.rollout.verdict is not None
    assert life.rollout.verdict.metric is Metric.SLOW_FIRST_TOKEN


def test_the_scale_follows_control():
    """A release is not slow because the day has become busier since the first stage."""
    life = running()
    assert life.rollout.thresholds.ttft_ms_high == 30
    for _ in range(6):
        life.window(arm(20, ttft_bucket=33), arm(1_000, ttft_bucket=33))
    assert (life.rollout.stage, life.rollout.thresholds.ttft_ms_high) == (1, 33)
