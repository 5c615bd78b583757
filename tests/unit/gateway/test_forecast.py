"""Forecasts stay within what can come, follow what came, and start from what the caller said."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.forecast import COLD_TOKENS, AnswerForecast

lengths = st.lists(st.integers(0, 2**30), max_size=60)


@given(lengths=lengths, most=st.integers(0, 2**30), is_bounded=st.booleans())
def test_a_forecast_never_exceeds_the_possible_length(
    lengths: list[int], most: int, is_bounded: bool
) -> None:
    forecast = AnswerForecast()
    for length in lengths:
        forecast.learn(length, 1)
    assert 0 <= forecast.tokens(most, 1, is_bounded=is_bounded) <= most


def test_a_cold_start_believes_the_caller() -> None:
    assert AnswerForecast().tokens(4000, 1, is_bounded=True) == 4000
    assert AnswerForecast().tokens(4000, 1, is_bounded=False) == COLD_TOKENS
    assert AnswerForecast().tokens(40, 1, is_bounded=False) == 40


@given(before=lengths, length=st.integers(0, 100_000))
def test_answers_of_one_length_are_learned(before: list[int], length: int) -> None:
    forecast = AnswerForecast()
    for old in before:
        forecast.learn(old, 1)
    for _ in range(400):
        forecast.learn(length, 1)
    assert length <= forecast.tokens(2**31, 1, is_bounded=False) <= length + 2


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_the_forecast_lies_among_the_answers_or_a_deviation_above(lengths: list[int]) -> None:
    forecast = AnswerForecast()
    for length in lengths:
        forecast.learn(length, 1)
    expected = forecast.tokens(2**31, 1, is_bounded=False)
    assert min(lengths) < expected <= 2 * max(lengths) + 1


def test_most_answers_fit_their_reservation() -> None:
    """Lengths spread evenly: the mean plus the mean deviation covers three quarters."""
    forecast, fitting = AnswerForecast(), 0
    order = [(index * 617) % 1000 for index in range(1000)]
    for length in order:
        fitting += forecast.tokens(2**31, 1, is_bounded=False) >= length
        forecast.learn(length, 1)
    assert 680 < fitting < 820


def test_several_answers_are_reserved_and_learned_one_by_one() -> None:
    forecast = AnswerForecast()
    assert forecast.tokens(10_000, 8, is_bounded=False) == 8 * COLD_TOKENS
    assert forecast.tokens(10_000, 8, is_bounded=True) == 10_000
    for _ in range(100):
        forecast.learn(50, 1)
    alone = forecast.tokens(2**31, 1, is_bounded=False)
    assert 50 <= alone <= 52
    assert forecast.tokens(2**31, 8, is_bounded=False) == 8 * alone
    for _ in range(100):
        forecast.learn(400, 8)
    assert forecast.tokens(2**31, 1, is_bounded=False) == alone
    assert forecast.tokens(100, 8, is_bounded=False) == 100
