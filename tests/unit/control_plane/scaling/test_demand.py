"""What a pool's demand teaches: base, noise, surges, and the same time on earlier days."""

import random
from math import cos, pi

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from control_plane.scaling.demand import BUCKET_S, DemandHistory


def _after(*demands: float) -> DemandHistory:
    history = DemandHistory()
    for demand in demands:
        history.add(demand)
    return history


def test_noise_is_learned_and_is_no_surge() -> None:
    drawn = random.Random(1)
    history = _after(*(20 * drawn.lognormvariate(0, 0.05) for _ in range(400)))
    forecast = history.forecast(300.0)
    assert not forecast.is_surge
    assert 0.03 < forecast.noise < 0.07
    assert forecast.base == pytest.approx(20, rel=0.05)
    assert forecast.surges_per_hour < 0.25  # the prior, and hours without one


def test_a_surge_is_seen_in_half_a_minute_and_remembered_with_its_peak() -> None:
    history = _after(*[10.0] * 100)
    for demand in (13.0, 17.0):
        history.add(demand)
    assert history.forecast(300.0).is_surge
    for demand in (*[22.0] * 20, *[10.0] * 20):
        history.add(demand)
    forecast = history.forecast(300.0)
    assert not forecast.is_surge
    assert forecast.base == 10.0
    assert forecast.peaks[-1] == pytest.approx(2.2)


def test_a_load_in_steps_is_noisier_than_one_surge() -> None:
    """A surge within the hour is spare's concern, and repeated steps make any forecast unsure."""
    one = _after(*[10.0] * 220, *[20.0] * 20)
    steps = _after(*[10.0] * 172, *[20.0] * 24, *[30.0] * 24, *[40.0] * 24)
    calm = _after(*[10.0] * 240)
    assert one.forecast(0.0).is_surge
    assert one.noise < calm.noise + 0.01
    assert steps.noise > 2 * calm.noise
    for _ in range(260):
        steps.add(40.0)
    assert steps.noise == pytest.approx(calm.noise, rel=0.1)


def test_a_fall_that_lasts_for_two_minutes_is_expected_to_last() -> None:
    history = _after(*[10.0] * 100, *[4.0] * 7)
    assert history.forecast(300.0).expected == 10.0
    history.add(4.0)
    assert history.forecast(300.0).expected == 4.0
    assert history.base == 10.0, "a return of the demand is no surge"


def test_noise_is_added_to_assumed_peaks_only() -> None:
    history = _after(*[10.0] * 100, *[22.0] * 20, *[10.0] * 20)
    forecast = history.forecast(300.0)
    assert forecast.peaks[-1] == pytest.approx(2.2)
    assert forecast.peaks[0] == pytest.approx(1.5 * (1 + forecast.noise))


def test_demand_that_stays_becomes_the_base() -> None:
    history = _after(*[10.0] * 100, *[20.0] * 160)
    forecast = history.forecast(300.0)
    assert not forecast.is_surge
    assert forecast.base == 20.0


def test_yesterdays_rise_is_expected_today() -> None:
    def day(at: int) -> float:
        return 30 - 20 * cos(2 * pi * at * BUCKET_S / 86400)

    history = DemandHistory()
    for at in range(5760 + 1440):  # a day, and a quarter of the next: the steepest rise
        history.add(day(at))
    assert history.forecast(3600.0).expected > 1.1 * history.base


def test_an_outage_of_yesterday_is_no_forecast_of_a_fall_nor_of_a_jump() -> None:
    history = DemandHistory()
    for at in range(5760 + 1440):
        is_out = 1440 - 60 <= at < 1440 + 30  # ends just after this time yesterday
        history.add(0.5 if is_out else 20.0)
    forecast = history.forecast(1800.0)
    assert 20.0 <= forecast.expected <= 40.0


@example([0.0] * 5 + [4.0] * 5 + [5e-324], 0.0)
@given(st.lists(st.floats(0, 1e6), max_size=300), st.floats(0, 1e4))
def test_a_forecast_is_finite_for_any_history(demands: list[float], horizon_s: float) -> None:
    forecast = _after(*demands).forecast(horizon_s)
    assert 0 <= forecast.expected < float("inf")
    assert 0 < forecast.noise <= 1
    assert forecast.expected >= forecast.base * 0.999
