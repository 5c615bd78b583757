"""Rollouts as people and programs see them."""

from dataclasses import replace

from control_plane.rollouts.evidence import Metric
from control_plane.rollouts.plan import Plan
from control_plane.rollouts.sequential import Count, SequentialTest
from control_plane.rollouts.shown import (
    Standing,
    details,
    explanation,
    progress,
    unknown_details,
    unknown_progress,
)
from control_plane.rollouts.state import Phase, Reason, Rollout, Verdict

PLANNED = Rollout(Plan())
TESTS = {
    metric: SequentialTest(0.02, canary=Count(1, 10), control=Count(2, 200))
    for metric in (Metric.ERRORS, Metric.FEWER_REFUSALS)
}
RUNNING = replace(
    PLANNED, phase=Phase.RUNNING, stage=0, wanted=0, share=100, watched_ms=1_500, tests=TESTS
)


def test_a_planned_one_has_seen_nothing() -> None:
    found = progress(Standing.of(PLANNED)) | details(PLANNED)
    assert (found["phase"], found["stage"], found["stages"]) == ("planned", -1, 4)
    assert (found["explanation"], found["gates"], found["watched_needed_s"]) == ("", [], 0.0)


def test_a_gate_shows_its_counts_by_release() -> None:
    found = details(RUNNING)
    assert (found["watched_s"], found["watched_needed_s"], found["sample_needed"]) == (
        *(1.5, 300.0),
        1_000,
    )
    errors, fewer = found["gates"]
    assert errors["canary"] == {"bad": 1, "total": 10}
    assert errors["control"] == {"bad": 2, "total": 200}
    assert fewer["canary"] == {"bad": 2, "total": 200}, "there control is the suspect"
    assert errors["e_value_log10"] == 0.0
    assert errors["e_value_needed_log10"] == 2.924  # 840
    assert errors["detectable_percent"] is None, "ten requests show no rate reliably"


def test_counts_of_ended_stages_are_kept() -> None:
    past = replace(RUNNING, sample=10, control_sample=200).evidence
    ended = replace(RUNNING, phase=Phase.DONE, stage=3, tests={}, past=(past,))
    found = details(ended)
    (stage,) = found["past_stages"]
    assert (stage["stage"], stage["share_percent"], stage["watched_s"]) == (0, 1, 1.5)
    assert (stage["sample"], stage["control_sample"]) == (10, 200)
    assert stage["gates"] == details(RUNNING)["gates"]


def test_it_says_why_it_is_where_it_is() -> None:
    assert explanation(Standing.of(RUNNING)) == ""
    assert explanation(Standing.of(replace(RUNNING, wanted=1))).endswith("stage 1")
    for reason in Reason:
        assert explanation(Standing.of(replace(RUNNING, phase=Phase.PAUSED, reason=reason)))
    verdict = Verdict(Metric.ERRORS, 0, Count(5, 9), Count(0, 9), 0.005, 7.0, 6.2, 10, 20)
    halted = replace(RUNNING, phase=Phase.HALTED, reason=Reason.WORSE, verdict=verdict)
    assert explanation(Standing.of(halted)).startswith("errors in stage 0: 5 of 9 in canary")


def test_one_that_cannot_be_read_shows_the_same_fields() -> None:
    shown = unknown_progress("of-tomorrow", 100, 0, "why") | unknown_details()
    assert shown.keys() == (progress(Standing.of(RUNNING)) | details(RUNNING)).keys()
    assert (shown["phase"], shown["share_percent"], shown["problem"]) == ("of-tomorrow", 1, "why")
