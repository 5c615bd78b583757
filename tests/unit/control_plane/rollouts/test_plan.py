"""Plans of rollouts: the default, what is refused and how it is said, the share of alpha."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from control_plane.rollouts.evidence import Metric
from control_plane.rollouts.plan import Gate, Plan, Stage


def test_the_default_is_one_ten_fifty_hundred_with_every_gate():
    plan = Plan()
    assert [stage.share for stage in plan.stages] == [100, 1_000, 5_000, 10_000]
    assert {gate.metric for gate in plan.gates} == set(Metric)
    assert plan.alpha == 0.05


def test_the_default_lasts_less_than_a_day_even_where_each_stage_takes_its_longest():
    *compared, last = Plan().stages
    longest_s = sum(stage.duration_max_s for stage in compared) + last.duration_min_s
    assert longest_s < 86_400
    assert last.sample_min == 0, "nothing is waited for there but time"


def test_alpha_is_divided_among_gates_and_the_stages_that_are_compared():
    assert Plan().alpha_of_test == pytest.approx(0.05 / (11 * 3))
    shadow = Stage(share=500, is_shadow=True)
    assert Plan(stages=(shadow, *Plan().stages)).alpha_of_test == pytest.approx(0.05 / (11 * 4))
    at_once = Plan(stages=(Stage(share=10_000),), gates=(Gate(metric=Metric.ERRORS, tolerated=0),))
    assert at_once.alpha_of_test == 0.05, "nothing is compared, nothing is divided"


def test_it_survives_json():
    plan = Plan(stages=(Stage(share=1_000, is_shadow=True), *Plan().stages), when_short="go_on")
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


FULL = {"share": 10_000}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stages": []}, "at least 1 item"),
        ({"stages": [{"share": 0}, FULL]}, "greater than or equal to 1"),
        ({"stages": [{"share": 10_001}]}, "less than or equal to 10000"),
        ({"stages": [{"share": 100}]}, "the last stage must have all of the traffic: share 10000"),
        ({"stages": [{"share": 10_000, "is_shadow": True}]}, "the last stage must have all"),
        ({"stages": [{"share": 500}, {"share": 100}, FULL]}, "shares must grow: 100 follows 500"),
        ({"stages": [{"share": 500}, {"share": 500}, FULL]}, "shares must grow: 500 follows 500"),
        (
            {"stages": [{"share": 1}, {"share": 2, "is_shadow": True}, FULL]},
            "only the first stage can be a shadow stage",
        ),
        (
            {"stages": [{"share": 10_000, "duration_min_s": 100.0, "duration_max_s": 99.0}]},
            "duration_max_s must not be below duration_min_s",
        ),
        (
            {"stages": [{"share": 10_000, "sample_min": 9, "sample_light": 10}]},
            "sample_light must not be above sample_min",
        ),
        ({"gates": []}, "at least 1 item"),
        ({"gates": [{"metric": "luck", "tolerated": 0}]}, "'errors', 'slow_first_token'"),
        ({"gates": [{"metric": "errors", "tolerated": 1}]}, "less than 1"),
        (
            {"gates": [{"metric": "errors", "tolerated": 0}, {"metric": "errors", "tolerated": 0}]},
            "more than one gate for errors",
        ),
        ({"alpha": 0}, "greater than 0"),
        ({"alpha": 0.51}, "less than or equal to 0.5"),
        ({"when_short": "hope"}, "'pause', 'go_on' or 'roll_back'"),
        ({"speed": 1}, "Extra inputs are not permitted"),
    ],
)
def test_what_is_wrong_is_said(body: dict[str, Any], message: str):
    with pytest.raises(ValidationError) as refused:
        Plan.model_validate_json(json.dumps(body))
    assert message in str(refused.value)
