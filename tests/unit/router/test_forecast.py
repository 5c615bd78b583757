"""Predictions: monotonic, bounded, corrected by what happened, and fair between tenants."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.decide import forecast
from router.core.decide.forecast import (
    Accuracy,
    Arrivals,
    FirstTokenForecast,
    Promises,
    Supply,
    TimedPrediction,
)

SECONDS = st.floats(0.0, 1e4, allow_nan=False)
SUPPLIES = st.builds(
    Supply,
    replicas=st.integers(1, 500),
    tokens_s=st.floats(1.0, 1e7),
    backlog_s=st.floats(0.0, 100.0),
    sequences_free=st.integers(0, 10_000),
    ends_s=st.floats(0.0, 1e5),
)
AHEAD = st.tuples(st.integers(0, 100_000), st.floats(0.0, 1e9))


def test_prefill_ahead_is_served_at_the_rate_of_all_replicas():
    supply = Supply(replicas=4, tokens_s=20_000.0, backlog_s=0.1, sequences_free=50, ends_s=5.0)
    assert forecast.queue_wait_s(supply, 10, 40_000) == pytest.approx(0.1 + 2.0)


def test_where_places_are_scarcer_than_prefill_they_decide():
    supply = Supply(replicas=1, tokens_s=20_000.0, backlog_s=0.1, sequences_free=0, ends_s=2.0)
    assert forecast.queue_wait_s(supply, 9, 1000) == pytest.approx(10 / 2.0)


def test_without_replicas_nothing_is_served():
    assert forecast.queue_wait_s(forecast.NO_SUPPLY, 0, 0.0) == math.inf
    assert forecast.service_s(forecast.NO_SUPPLY, 100.0) == 0.0


@given(SUPPLIES, AHEAD, AHEAD)
def test_more_ahead_is_never_a_shorter_wait(supply, ahead, more):
    wait_s = forecast.queue_wait_s(supply, *ahead)
    assert forecast.queue_wait_s(supply, ahead[0] + more[0], ahead[1] + more[1]) >= wait_s >= 0.0


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=60), SECONDS, SECONDS)
def test_the_correction_stays_within_its_bounds(samples, queue_s, own_s):
    accuracy = Accuracy()
    for predicted_s, actual_s in samples:
        accuracy.observe(predicted_s, actual_s)
    correction = accuracy.correction()
    assert forecast.CORRECTION_MIN <= correction <= forecast.CORRECTION_MAX
    ttft_s = TimedPrediction(accuracy, queue_s, own_s).ttft_s()
    assert ttft_s >= own_s + forecast.CORRECTION_MIN * queue_s
    assert ttft_s <= own_s + forecast.CORRECTION_MAX * queue_s


@given(st.floats(0.6, 3.5), st.floats(0.5, 50.0))
def test_the_correction_finds_a_constant_error(factor, predicted_s):
    accuracy = Accuracy()
    for _ in range(200):
        accuracy.observe(predicted_s, factor * predicted_s)
    assert accuracy.correction() == pytest.approx(factor, rel=0.01)


def test_long_waits_count_for_more_than_short_ones():
    accuracy = Accuracy()
    for _ in range(100):
        accuracy.observe(10.0, 10.0)
        accuracy.observe(0.01, 0.1)  # ten times too little, and nobody cares
    assert accuracy.correction() == pytest.approx(1.0, abs=0.05)


def test_an_expired_request_teaches_only_a_lower_bound():
    accuracy = Accuracy()
    TimedPrediction(accuracy, 40.0, 1.0).expired(30.0)
    assert accuracy.correction() == 1.0
    TimedPrediction(accuracy, 10.0, 1.0).expired(30.0)
    assert accuracy.correction() > 1.0


def test_only_the_wait_is_corrected_and_by_size():
    forecast = FirstTokenForecast()
    short, long = forecast.accuracy(100, 1000.0), forecast.accuracy(9000, 1000.0)
    for _ in range(200):
        TimedPrediction(short, 1.0, 0.5).first_token(1.5)
        TimedPrediction(long, 1.0, 5.0).first_token(8.0)
    assert TimedPrediction(short, 2.0, 0.1).ttft_s() == pytest.approx(2.1, rel=0.01)
    assert TimedPrediction(long, 2.0, 7.0).ttft_s() == pytest.approx(6.0 + 7.0, rel=0.01)


def test_overtaking_ends_when_it_is_overdue():
    accuracy = Accuracy()
    for _ in range(200):
        accuracy.observe(1.0, 4.0)
    assert TimedPrediction(accuracy, 2.0, 0.0).ttft_s() == pytest.approx(8.0, rel=0.01)
    assert TimedPrediction(accuracy, 2.0, 1.0, overdue_s=5.0).ttft_s() == pytest.approx(6.0)
    assert TimedPrediction(accuracy, 7.0, 1.0, overdue_s=5.0).ttft_s() == pytest.approx(8.0)


def test_arrivals_of_higher_tiers_are_known_as_a_rate():
    arrivals = Arrivals()
    for step in range(400):
        arrivals.add(9, 1000, step / 10)
        arrivals.add(5, 4000, step / 10)
    now = 40.0
    assert arrivals.above(9, now) == (0.0, 0.0)
    assert arrivals.above(5, now) == pytest.approx((10.0, 10_000.0), rel=0.05)
    assert arrivals.above(1, now) == pytest.approx((20.0, 50_000.0), rel=0.05)
    assert arrivals.above(1, now + 60.0) == pytest.approx((0.0, 0.0), abs=1.0)
    arrivals.add(9, 1000, now + 1000.0)
    assert arrivals.above(1, now + 1000.0) == pytest.approx((0.2, 200.0), rel=0.05)


def test_a_burst_at_the_start_is_no_rate():
    arrivals = Arrivals()
    for _ in range(20):
        arrivals.add(9, 1000, 0.0)
    assert arrivals.above(1, 0.0) == pytest.approx((10.0, 10_000.0))


@given(SUPPLIES, st.floats(0.0, 1e6), st.floats(0.0, 1e8), st.floats(0.0, 1.0))
def test_something_is_always_left(supply, requests_s, tokens_s, reserved):
    share = forecast.share_left(supply, requests_s, tokens_s, reserved)
    assert max(reserved, 0.01) <= share <= 1.0
    assert forecast.share_left(supply, 2 * requests_s, 2 * tokens_s, reserved) <= share
    assert forecast.share_left(supply, 0.0, 0.0, reserved) == 1.0


@given(SECONDS, st.floats(0.01, 1.0), st.floats(0.0, 5.0))
def test_arrivals_are_not_taken_to_go_on_for_ever(wait_s, share, for_s):
    longer_s = forecast.beside_s(wait_s, share, for_s)
    assert wait_s <= longer_s <= wait_s + for_s + 1e-9
    assert longer_s <= wait_s / share + 1e-9
    assert forecast.beside_s(wait_s, share / 2, for_s) >= longer_s - 1e-9


@given(st.lists(st.tuples(st.integers(0, 2), SECONDS, SECONDS, SECONDS), max_size=40))
def test_a_retry_after_is_never_zero_and_never_long(events):
    promises, now = Promises(), 0.0
    for priority, wait_s, service_s, pause_s in events:
        now += pause_s
        told_s = promises.retry_after_s(priority, wait_s, service_s, now)
        assert forecast.RETRY_AFTER_MIN_S <= told_s <= forecast.RETRY_AFTER_MAX_S
        assert told_s >= min(wait_s, forecast.RETRY_AFTER_MAX_S) - 1e-6


def test_refused_requests_are_told_to_come_one_after_the_other():
    promises = Promises()
    told = [promises.retry_after_s(0, 2.0, 0.5, 100.0) for _ in range(4)]
    assert told == pytest.approx([2.0, 2.5, 3.0, 3.5])
    assert promises.retry_after_s(1, 2.0, 0.5, 100.0) == pytest.approx(2.0)
    assert promises.retry_after_s(0, 0.0, 0.5, 104.5) == pytest.approx(0.1)  # all that is over


def test_the_highest_tier_of_late_is_the_top():
    forecast = FirstTokenForecast()
    forecast.seen(5, 0.0)
    forecast.seen(1, 1.0)
    assert forecast.is_top(5)
    assert not forecast.is_top(1)
    forecast.seen(1, 100.0)
    assert forecast.is_top(1)


def test_a_forecast_aside_knows_the_same_and_learns_for_itself():
    forecast = FirstTokenForecast()
    forecast.accuracy(10, 1.0).observe(1.0, 2.0)
    forecast.arrivals.add(1, 100, 0.0)
    forecast.promises.retry_after_s(1, 1.0, 1.0, 0.0)
    forecast.seen(2, 0.0)

    def known() -> tuple[object, ...]:
        return forecast.accuracy(10, 1.0).correction(), forecast.arrivals.above(0, 1.0)

    aside, before = forecast.aside(), known()
    assert aside.accuracy(10, 1.0).correction() == before[0]
    assert aside.arrivals.above(0, 1.0) == before[1]
    assert not aside.is_top(1)
    aside.accuracy(10, 1.0).observe(1.0, 50.0)
    aside.arrivals.add(1, 100, 0.5)
    late_s = aside.promises.retry_after_s(1, 1.0, 1.0, 0.0)
    assert known() == before
    assert forecast.promises.retry_after_s(1, 1.0, 1.0, 0.0) == late_s
