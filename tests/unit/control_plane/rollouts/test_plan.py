"""Plans of rollouts: the default, what is refused and how it is said, the share of alpha."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from control_plane.percent import OF_CLIENT
from control_plane.rollouts.evidence import Metric
from control_plane.rollouts.plan import Gate, Plan, Stage, shown


def test_the_default_is_one_ten_fifty_hundred_with_every_gate():
    plan = Plan()
    assert [stage.share for stage in plan.stages] == [100, 1_000, 5_000, 10_000]
    assert [stage.duration_min_s / 60 for stage in plan.stages[:3]] == [5, 15, 30]
    assert {gate.metric for gate in plan.gates} == set(Metric)
    assert plan.alpha == 0.05


def test_the_default_lasts_less_than_a_day_even_where_each_stage_takes_its_longest():
    *compared, last = Plan().stages
    longest_s = sum(stage.duration_max_s for stage in compared) + last.duration_min_s
    assert longest_s < 86_400
    assert last.sample_min == 0, "nothing is waited for there but time"


def test_alpha_is_divided_among_gates_and_the_stages_that_are_compared():
    assert Plan().alpha_of_test == pytest.approx(0.05 / (14 * 3))
    shadow = Stage(share=500, is_shadow=True)
    assert Plan(stages=(shadow, *Plan().stages)).alpha_of_test == pytest.approx(0.05 / (14 * 4))
    at_once = Plan(stages=(Stage(share=10_000),), gates=(Gate(metric=Metric.ERRORS, tolerated=0),))
    assert at_once.alpha_of_test == 0.05, "nothing is compared, nothing is divided"


def test_it_survives_json():
    plan = Plan(stages=(Stage(share=1_000, is_shadow=True), *Plan().stages), when_short="go_on")
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


FULL = {"share_percent": 100}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stages": []}, "at least 1 item"),
        ({"stages": [{"share_percent": 0}, FULL]}, "share_percent: 0.01 to 100 is expected"),
        ({"stages": [{"share_percent": 100.01}]}, "share_percent: 0.01 to 100 is expected"),
        ({"stages": [{"share_percent": 1}]}, "the last stage must have all of the traffic"),
        ({"stages": [{"share_percent": 100, "is_shadow": True}]}, "the last stage must have all"),
        (
            {"stages": [{"share_percent": 5}, {"share_percent": 1}, FULL]},
            "shares must grow: 1 % follows 5 %",
        ),
        (
            {"stages": [{"share_percent": 5}, {"share_percent": 5}, FULL]},
            "shares must grow: 5 % follows 5 %",
        ),
        (
            {"stages": [{"share_percent": 0.01}, {"share_percent": 0.02, "is_shadow": True}, FULL]},
            "only the first stage can be a shadow stage",
        ),
        (
            {"stages": [{"share_percent": 100, "duration_min_s": 100.0, "duration_max_s": 99.0}]},
            "duration_max_s must not be below duration_min_s",
        ),
        (
            {"stages": [{"share_percent": 100, "sample_min": 9, "sample_light": 10}]},
            "sample_light must not be above sample_min",
        ),
        ({"gates": []}, "at least 1 item"),
        ({"gates": [{"metric": "luck", "tolerated_percent": 0}]}, "'errors', 'slow_first_token'"),
        (
            {"gates": [{"metric": "errors", "tolerated_percent": 100}]},
            "tolerated_percent: 0 to 99.99",
        ),
        (
            {
                "gates": [
                    {"metric": "errors", "tolerated_percent": 0},
                    {"metric": "errors", "tolerated_percent": 0},
                ]
            },
            "more than one gate for errors",
        ),
        ({"stages": [{"share": 100}, FULL]}, "share: shares are in percent: give share_percent"),
        ({"stages": [{"share_percent": 0.015}, FULL]}, "steps of 0.01 percent"),
        ({"stages": [{"share_percent": "5"}, FULL]}, "a number of percent is expected"),
        ({"alpha": 0}, "greater than 0"),
        ({"alpha": 0.51}, "less than or equal to 0.5"),
        ({"when_short": "hope"}, "'pause', 'go_on' or 'roll_back'"),
        ({"speed": 1}, "Extra inputs are not permitted"),
    ],
)
def test_invalid_plans_name_their_fault(body: dict[str, Any], message: str):
    with pytest.raises(ValidationError) as refused:
        Plan.model_validate_json(json.dumps(body), context=OF_CLIENT)
    assert message in str(refused.value)


def test_a_shown_plan_can_be_sent_again():
    plan = Plan(stages=(Stage(share=25), Stage(share=10_000)))
    document = shown(plan.model_dump(mode="json"))
    assert document["stages"][0]["share_percent"] == 0.25
    assert Plan.model_validate_json(json.dumps(document), context=OF_CLIENT) == plan
    properties = Plan.model_json_schema()["$defs"]
    assert properties["Stage"]["properties"].keys() == document["stages"][0].keys()
    assert properties["Gate"]["properties"].keys() == document["gates"][0].keys()


def test_the_default_stages_last_5_15_and_30_minutes() -> None:
    stages = Plan().stages
    assert [(it.share, it.duration_min_s / 60) for it in stages[:-1]] == [
        (100, 5),
        (1_000, 15),
        (5_000, 30),
    ]
    assert stages[-1].share == 10_000
