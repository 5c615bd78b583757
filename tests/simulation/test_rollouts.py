"""Simulated rollouts: bad releases go back by themselves, good ones are promoted by themselves."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from control_plane.rollouts.evidence import Metric
from control_plane.rollouts.plan import Plan
from control_plane.rollouts.state import Phase
from sim import rollouts
from sim.rollout_edge import is_accused
from sim.rollout_traffic import CONTROL, Traffic, TrafficProfile, histogram
from sim.rollouts import SCENARIOS, RolloutOutcome, plan_for, simulate
from sluice.buckets import bucket_of
from sluice.split import ReleaseSplit

PLAN = plan_for(0.05)
PROFILE = TrafficProfile()
SEEDS = range(2)  # docs/rollouts.md tells of 200


@cache
def outcome_of(name: str, seed: int = 0) -> RolloutOutcome:
    """How a release fares with the usual plan and traffic; each takes up to a second."""
    return simulate(PLAN, SCENARIOS[name], PROFILE, seed)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("wrong", {Metric.GOLDEN}),
        ("slow", {Metric.SLOW_FIRST_TOKEN, Metric.SLOW_TOKENS}),
        ("errors", {Metric.ERRORS}),
        ("longer", {Metric.LONG_ANSWERS}),
        ("shorter", {Metric.SHORT_ANSWERS}),
        ("refusing", {Metric.REFUSALS}),
    ],
)
def test_a_bad_release_goes_back_by_itself(name: str, metrics: set[Metric]):
    for seed in SEEDS:
        outcome = outcome_of(name, seed)
        assert outcome.phase is Phase.ROLLED_BACK
        assert outcome.metric in metrics
        assert outcome.stage < 3, "before it has all of the traffic"


def test_a_wrong_or_slow_release_is_found_in_the_first_stage():
    for name, exposed_max in (("wrong", 400), ("slow", 100)):
        outcome = outcome_of(name)
        assert outcome.stage == 0
        assert outcome.exposed <= exposed_max


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("garbage", {Metric.REPETITIVE_ANSWERS, Metric.CUT_ANSWERS}),
        ("silent", {Metric.EMPTY_ANSWERS}),
        ("inert", {Metric.BASE_LIKE_ANSWERS}),
        ("noise", {Metric.UNLIKELY_ANSWERS, Metric.UNSURE_ANSWERS}),
    ],
)
def test_garbage_goes_back_within_twenty_answers_without_any_prompt_of_its_own(
    name: str, metrics: set[Metric]
):
    for seed in SEEDS:
        outcome = simulate(Plan(), SCENARIOS[name], TrafficProfile(rate=1.0), seed)
        assert (outcome.phase, outcome.stage) == (Phase.ROLLED_BACK, 0)
        assert outcome.metric in metrics
        assert outcome.judged <= 20


@pytest.mark.parametrize("name", rollouts.GOOD)
def test_a_good_release_is_promoted_by_itself(name: str):
    assert {outcome_of(name, seed).phase for seed in SEEDS} == {Phase.DONE}


def test_as_bad_as_tolerated_is_rarely_accused(capsys: pytest.CaptureFixture[str]):
    """At most 5 % is stated; docs/rollouts.md tells of more seeds."""
    assert sum(is_accused(PLAN, 600.0, seed) for seed in range(20)) <= 1
    rollouts.main(["--edge", "1"])
    assert "of 1 accused, stated 5%" in capsys.readouterr().out


def test_a_shadow_stage_exposes_no_caller_to_a_broken_release():
    plan = plan_for(0.05, has_shadow=True)
    outcome = simulate(plan, SCENARIOS["slow"], PROFILE, 0)
    assert (outcome.phase, outcome.stage, outcome.exposed) == (Phase.ROLLED_BACK, 0, 0)
    assert simulate(plan, CONTROL, PROFILE, 0).phase is Phase.DONE


def test_a_seed_repeats_itself():
    assert simulate(PLAN, SCENARIOS["errors"], PROFILE, 1) == outcome_of("errors", 1)


def test_little_traffic_takes_longer_and_is_judged_all_the_same():
    outcome = simulate(PLAN, SCENARIOS["slow"], TrafficProfile(rate=5.0), 0)
    assert (outcome.phase, outcome.stage) == (Phase.ROLLED_BACK, 0)


def test_the_share_of_canary_equals_the_planned_one():
    traffic = Traffic(PROFILE, 1)
    split = ReleaseSplit("model", "old", "new", 1_000, "salt")
    arms = [traffic.window(split, 0, CONTROL)[:2] for _ in range(60)]
    canary, control = (sum(arm[side].requests for arm in arms) for side in (0, 1))
    assert canary / (canary + control) == pytest.approx(0.1, rel=0.15)


def test_histograms_equal_the_evidence():
    values = np.random.default_rng(0).lognormal(5, 4, 1_000)
    counts = histogram(values).counts
    for bucket in range(len(counts)):
        assert counts[bucket] == sum(bucket_of(value) == bucket for value in values.tolist())


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    rollouts.main(["--scenario", "slow,wrong", "--seeds", "2", "--jobs", "1", "--json", str(out)])
    assert "| slow | 2 | 2 |" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert [figure["rolled_back"] for figure in record["scenarios"]] == [2, 2]
    assert record["plan"]["alpha"] == 0.05
    with pytest.raises(SystemExit):
        rollouts.main(["--scenario", "nonsense"])
