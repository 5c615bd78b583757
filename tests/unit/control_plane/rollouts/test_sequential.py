"""The sequential test: valid however it is looked at, quick where it matters, small, never broken."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from control_plane.rollouts.sequential import (
    Count,
    SequentialTest,
    detectable_rate,
    observe,
    rescaled,
)

ADAPTER = TypeAdapter(SequentialTest)
NOTHING = Count(0, 0)

rates = st.floats(0.001, 0.999)
margins = st.sampled_from((0.0, 0.005, 0.02, 0.1, 0.5))


@st.composite
def counts(draw: st.DrawFn, total_max: int = 500) -> Count:
    total = draw(st.integers(0, total_max))
    return Count(draw(st.integers(0, total)), total)


def known(margin: float, rate: float, total: int = 2_000) -> SequentialTest:
    """A test that has seen control before."""
    return observe(SequentialTest(margin), NOTHING, Count(round(rate * total), total))


def binomial(total: int, rate: float, bad: int) -> float:
    return math.comb(total, bad) * rate**bad * (1 - rate) ** (total - bad)


def expected_e(
    test: SequentialTest, canary: tuple[int, float], control: tuple[int, float]
) -> float:
    """The exact mean of the e-value after one more window, over all that may happen in it."""
    (n1, p1), (n0, p0) = canary, control
    return sum(
        binomial(n1, p1, x1)
        * binomial(n0, p0, x0)
        * math.exp(observe(test, Count(x1, n1), Count(x0, n0)).log_e)
        for x1, x0 in product(range(n1 + 1), range(n0 + 1))
    )


@settings(max_examples=150)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    rates,
    st.floats(0, 1),
    margins,
    rates,
    st.lists(st.tuples(counts(40), counts(40)), max_size=3),
)
def test_no_window_is_expected_to_add_evidence_when_canary_is_not_worse(
    n1: int,
    n0: int,
    p0: float,
    part: float,
    margin: float,
    believed: float,
    before: list[tuple[Count, Count]],
):
    """The whole proof, by enumeration: so the e-value is a supermartingale, and Ville's inequality holds.

    Whatever was seen before, whatever is believed of control, and at the edge of what is tolerated.
    """
    test = known(margin, believed)
    for canary, control in before:
        test = observe(test, canary, control)
    p1 = part * (p0 + margin * (1 - p0))
    e = math.exp(test.log_e)
    assert expected_e(test, (n1, p1), (n0, p0)) <= e * (1 + 1e-9)


def test_at_the_edge_of_tolerance_the_test_is_nearly_fair():
    """So nothing is given away either."""
    test = known(0.02, 0.1)
    edge = 0.1 + 0.02 * 0.9
    assert expected_e(test, (5, edge), (50, 0.1)) > 0.95
    assert expected_e(test, (5, 0.3), (50, 0.1)) > 1.2


def windows(
    draw: np.random.Generator, canary: tuple[int, float], control: tuple[int, float]
) -> tuple[Count, Count]:
    def arm(total: int, rate: float) -> Count:
        return Count(int(draw.binomial(total, rate)), total)

    return arm(*canary), arm(*control)


def alarms(seeds: int, rounds: int, canary: tuple[int, float], control: tuple[int, float]) -> int:
    found = 0
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        test = known(0.0, control[1])
        for _ in range(rounds):
            test = observe(test, *windows(draw, canary, control))
            if test.is_worse(0.05):
                found += 1
                break
    return found


def test_looking_after_every_window_raises_no_more_alarms_than_stated():
    """200 times 100 looks: 10 false alarms are stated, several times as many without the correction."""
    assert alarms(200, 100, (5, 0.1), (5, 0.1)) <= 10


def test_it_does_not_matter_how_much_control_says():
    assert alarms(200, 50, (2, 0.1), (30, 0.1)) <= 10
    assert alarms(200, 50, (20, 0.1), (2, 0.1)) <= 10


def until_found(
    test: SequentialTest,
    alpha: float,
    canary: tuple[int, float],
    control: tuple[int, float],
    seed: int,
) -> int:
    """How many canary requests it takes."""
    draw = np.random.default_rng(seed)
    for _ in range(10_000):
        test = observe(test, *windows(draw, canary, control))
        if test.is_worse(alpha):
            return test.canary.total
    raise AssertionError("never found")


ALPHA = 0.05 / 24  # of a rollout, over 8 gates and 3 stages


def test_five_errors_in_a_hundred_instead_of_one_are_found_within_a_few_hundred_requests():
    needed = [until_found(known(0.005, 0.01), ALPHA, (2, 0.05), (198, 0.01), s) for s in range(9)]
    assert sorted(needed)[4] <= 400


def test_three_times_slower_is_found_within_fifty_requests():
    """65 % lie above control's 95 % quantile then, for a lognormal TTFT with sigma 0.9."""
    needed = [until_found(known(0.05, 0.05), ALPHA, (1, 0.65), (20, 0.05), s) for s in range(9)]
    assert max(needed) <= 50


def test_a_base_rate_that_moves_raises_no_alarm_and_hides_no_difference():
    for is_bad in (False, True):
        draw = np.random.default_rng(1)
        test = known(0.01, 0.02)
        for number in range(150):
            rate = 0.02 + 0.1 * math.sin(number / 150 * math.pi) ** 2
            worse = rate + 0.12 if is_bad else rate
            test = observe(test, *windows(draw, (4, worse), (60, rate)))
            if test.is_worse(ALPHA):
                break
        assert test.is_worse(ALPHA) == is_bad


def test_late_degradation_is_found_nearly_as_soon():
    test = known(0.005, 0.01)
    for seed in range(300):
        test = observe(test, *windows(np.random.default_rng(seed), (10, 0.01), (90, 0.01)))
    assert not test.is_worse(ALPHA)
    good = test.canary.total
    needed = [until_found(test, ALPHA, (10, 0.2), (90, 0.01), seed) - good for seed in range(5)]
    assert max(needed) <= 90, "140 if nothing were kept back"


def test_an_incident_that_hits_both_arms_alike_says_nothing():
    test = known(0.005, 0.01)
    for seed in range(20):
        test = observe(test, *windows(np.random.default_rng(seed), (10, 0.5), (90, 0.5)))
    assert not test.is_worse(ALPHA)
    for seed in range(20):
        test = observe(test, *windows(np.random.default_rng(seed), (10, 0.01), (90, 0.01)))
    good = test.canary.total
    assert until_found(test, ALPHA, (10, 0.3), (90, 0.01), 0) - good <= 150


def test_without_both_arms_nothing_is_said_but_control_is_remembered():
    start = SequentialTest(0.01)
    assert observe(start, NOTHING, NOTHING) == start
    assert observe(start, Count(10, 10), NOTHING).log_e == 0
    after = observe(start, NOTHING, Count(3, 100))
    assert (after.log_e, after.bets) == (0, 0)
    assert (after.memory_bad, after.memory_total) == (3, 100)


def test_nothing_is_bet_before_control_is_known():
    test = SequentialTest(0.01)
    for _ in range(4):
        test = observe(test, Count(5, 5), Count(0, 10))
    assert test.bets == 0
    test = observe(test, Count(5, 5), Count(0, 10))
    assert test.bets == 0
    assert observe(test, Count(5, 5), Count(0, 10)).bets == 1


def test_a_release_that_always_fails_where_none_did_is_found_after_a_few():
    test = known(0.005, 0.0)
    for _ in range(6):
        test = observe(test, Count(1, 1), Count(0, 99))
    assert test.is_worse(ALPHA)


@settings(max_examples=100)
@given(margins, st.lists(st.tuples(counts(), counts()), max_size=8))
def test_it_is_small_finite_and_survives_json(margin: float, seen: list[tuple[Count, Count]]):
    test = SequentialTest(margin)
    for canary, control in seen:
        test = observe(test, canary, control)
        assert math.isfinite(test.log_e)
        assert test.memory_total <= 2_000 + 1e-6
        text = ADAPTER.dump_json(test)
        assert len(text) < 700
        assert ADAPTER.validate_json(text) == test


def test_a_count_is_checked():
    with pytest.raises(AssertionError):
        Count(2, 1)


@pytest.mark.parametrize(("canary", "control"), [(288, 28_000), (1_000, 9_000)])
def test_the_detectable_rate_is_found_as_often_as_told(canary: int, control: int):
    """As often as 19 of 20; half of that difference is found in less than half of all cases."""
    alpha, rate0 = 0.001, 0.01
    counted = replace(known(0.005, rate0), canary=Count(0, canary), control=Count(0, control))
    rate = detectable_rate(counted, alpha)
    assert rate is not None
    draw = np.random.default_rng(1)

    def found(rate1: float) -> int:
        bad1, bad0 = draw.binomial(canary, rate1, 100), draw.binomial(control, rate0, 100)
        pairs = zip(bad1.tolist(), bad0.tolist(), strict=True)
        tests = [
            observe(known(0.005, rate0), Count(bad, canary), Count(good, control))
            for bad, good in pairs
        ]
        return sum(test.is_worse(alpha) for test in tests)

    assert found(rate) >= 90
    assert found((rate + rate0) / 2) <= 50


def test_too_few_requests_detect_nothing():
    few = replace(known(0.05, 0.01), canary=Count(0, 2), control=Count(0, 200))
    assert detectable_rate(few, 0.001) is None
    assert detectable_rate(known(0.05, 0.01), 0.001) is None


def test_windows_are_put_together_until_there_is_enough_of_control():
    alone = known(0.02, 0.01)
    together = observe(replace(alone, reference_min=32), Count(1, 1), Count(0, 2))
    for _ in range(14):
        assert (together.bets, together.log_e) == (0, alone.log_e)
        together = observe(together, NOTHING, Count(0, 2))
    together = observe(together, NOTHING, Count(1, 2))
    whole = observe(alone, Count(1, 1), Count(1, 32))
    assert replace(together, reference_min=0) == whole
    assert whole.log_e > observe(alone, Count(1, 1), Count(0, 2)).log_e, "canary is rarer there"


def test_windows_do_not_wait_for_control_for_ever_nor_for_another_scale():
    test = replace(known(0.02, 0.01), reference_min=32)
    for number in range(30):
        assert test.bets == 0, number
        test = observe(test, Count(0, 1), Count(0, 1))
    assert (test.bets, test.canary, test.waiting_windows) == (1, Count(0, 30), 0)
    test = rescaled(observe(test, Count(1, 1), Count(0, 5)), Count(50, 1_000))
    assert (test.canary, test.waiting_control) == (Count(1, 31), NOTHING)
    assert (test.memory_bad, test.memory_total) == (50, 1_000)
