"""From counts to proportions: what counts against a release, and what does not."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.rollouts.evidence import (
    Arm,
    Baseline,
    Histogram,
    Metric,
    ScoreEvidence,
    Thresholds,
    Window,
    comparisons,
    known,
    remember,
    scale,
)
from control_plane.rollouts.sequential import Count
from sluice.buckets import BUCKETS, bucket_of
from sluice.errors import ErrorCode, ErrorEvidence


def of(values: Sequence[float]) -> Histogram:
    counts = [0] * BUCKETS
    for value in values:
        counts[bucket_of(value)] += 1
    return Histogram(tuple(counts))


def test_only_the_clients_errors_and_refusals_by_policy_are_left_out():
    """Whoever adds a code of another status decides where it belongs."""
    left_out = {code for code in ErrorCode if code.policy.release is ErrorEvidence.NONE}
    faults = {code for code in ErrorCode if code.policy.release is ErrorEvidence.FAULT}
    assert {code for code in left_out if not 400 <= code.policy.status < 500} == {
        code for code in left_out if code.policy.status == 503
    }
    assert ErrorCode.CLIENT_CLOSED in left_out
    assert all(code.policy.status != 429 for code in faults)


def test_errors_of_clients_and_overload_are_neither_good_nor_bad():
    arm = Arm(
        requests=100,
        errors={
            ErrorCode.INVALID_REQUEST: 10,
            ErrorCode.RATE_LIMIT_TOKENS: 20,
            ErrorCode.OVERLOADED: 30,
            ErrorCode.CLIENT_CLOSED: 5,
            ErrorCode.ENGINE_FAILED: 3,
            ErrorCode.REPLICA_LOST: 1,
        },
    )
    assert arm.answers == 31
    assert arm.faults == Count(4, 35)


def test_a_missed_deadline_is_slow_and_no_error():
    arm = Arm(
        requests=10, errors={ErrorCode.DEADLINE_EXCEEDED: 4}, ttft_ms=of([100, 100, 100, 100, 900])
    )
    assert arm.faults == Count(0, 6)
    assert arm.slow_first_tokens(bucket_of(100)) == Count(5, 9)


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_buckets_are_in_order_and_bounded(one: float, other: float):
    low, high = sorted((one, other))
    assert 0 <= bucket_of(low) <= bucket_of(high) < BUCKETS


def test_buckets_grow_by_a_fifth():
    assert [bucket_of(value) for value in (0, 0.5, 1, 1.18, 1.2, 2, 4, 2**24, 2**30)] == (
        [0, 0, 0, 0, 1, 4, 8, 96, 96]
    )


@given(st.dictionaries(st.integers(0, BUCKETS - 1), st.integers(1, 99), min_size=1, max_size=9))
def test_thresholds_leave_a_twentieth_of_control_beyond_at_most(some: dict[int, int]):
    counts = [some.get(bucket, 0) * 200 for bucket in range(BUCKETS)]
    baseline = Baseline(output_tokens=Histogram(tuple(counts)))
    thresholds = scale(baseline)
    high, low = thresholds.output_tokens_high, thresholds.output_tokens_low
    assert high is not None
    assert low is not None
    assert low <= high
    for beyond in (baseline.output_tokens.above(high), baseline.output_tokens.below(low)):
        assert beyond.ratio <= 0.05
    assert known(baseline, thresholds)[Metric.LONG_ANSWERS] == baseline.output_tokens.above(high)
    if high:
        assert baseline.output_tokens.above(high - 1).ratio > 0.05, "no higher than needed"


def test_thresholds_wait_for_enough_of_control():
    few = Baseline(ttft_ms=of([100] * 199))
    assert scale(few) == Thresholds()
    enough = scale(remember(few, Arm(1, ttft_ms=of([100]))))
    assert enough.ttft_ms_high == bucket_of(100)
    assert enough.tpot_us_high is None


def test_a_baseline_forgets():
    baseline = Baseline()
    for _ in range(200):
        baseline = remember(baseline, Arm(1_000, {ErrorCode.INTERNAL: 10}, ttft_ms=of([10] * 990)))
    assert baseline.ttft_ms.total <= 20_000
    assert baseline.faults.total <= 20_000
    assert baseline.faults.ratio == pytest.approx(0.01, rel=0.05)
    for _ in range(50):
        baseline = remember(baseline, Arm(1_000, ttft_ms=of([99] * 1_000)))
    assert baseline.ttft_ms.above(bucket_of(10)).ratio > 0.9


def test_a_window_is_compared_metric_by_metric():
    canary = Arm(
        10,
        {ErrorCode.INTERNAL: 2},
        refusals=3,
        empty_answers=5,
        repetitive_answers=6,
        cut_answers=7,
        ttft_ms=of([100] * 4 + [900] * 4),
        tpot_us=of([10] * 7 + [90]),
        output_tokens=of([1, 50, 50, 50, 900, 900, 900, 900]),
        scores=ScoreEvidence(6, 5, of([100] * 5 + [900]), of([10] * 4 + [90] * 2)),
        golden_runs=5,
        golden_mismatches=4,
    )
    control = Arm(100, refusals=1, ttft_ms=of([100] * 100), golden_runs=6)
    thresholds = Thresholds(
        *(bucket_of(it) for it in (100, 10, 50, 50)), bucket_of(100), bucket_of(10)
    )
    found = comparisons(Window(0, 10, canary, control), thresholds)
    assert set(found) == set(Metric)
    suspects = {metric: found[metric].suspect for metric in Metric}
    assert suspects == {
        Metric.ERRORS: Count(2, 10),
        Metric.SLOW_FIRST_TOKEN: Count(4, 8),
        Metric.SLOW_TOKENS: Count(1, 8),
        Metric.LONG_ANSWERS: Count(4, 8),
        Metric.SHORT_ANSWERS: Count(1, 8),
        Metric.REFUSALS: Count(3, 8),
        Metric.FEWER_REFUSALS: Count(1, 100),
        Metric.EMPTY_ANSWERS: Count(5, 8),
        Metric.REPETITIVE_ANSWERS: Count(6, 8),
        Metric.CUT_ANSWERS: Count(7, 8),
        Metric.BASE_LIKE_ANSWERS: Count(5, 6),
        Metric.UNLIKELY_ANSWERS: Count(1, 6),
        Metric.UNSURE_ANSWERS: Count(2, 6),
        Metric.GOLDEN: Count(4, 5),
    }
    assert found[Metric.FEWER_REFUSALS].reference == Count(3, 8), "the sides are swapped"
    assert found[Metric.SLOW_TOKENS].reference == Count(0, 0)
    assert found[Metric.BASE_LIKE_ANSWERS].reference == Count(0, 0), "no engine scored any"


def test_without_thresholds_only_the_rest_is_compared():
    found = comparisons(Window(0, 10, Arm(), Arm()), Thresholds())
    of_thresholds = {Metric.SLOW_FIRST_TOKEN, Metric.SLOW_TOKENS}
    of_thresholds |= {Metric.LONG_ANSWERS, Metric.SHORT_ANSWERS}
    of_thresholds |= {Metric.UNLIKELY_ANSWERS, Metric.UNSURE_ANSWERS}
    assert set(found) == set(Metric) - of_thresholds


def test_impossible_evidence_is_refused():
    with pytest.raises(AssertionError):
        Arm(1, {ErrorCode.INTERNAL: 1}, refusals=1)
    with pytest.raises(AssertionError):
        Arm(1, {ErrorCode.INTERNAL: 1}, cut_answers=1)
    with pytest.raises(AssertionError):
        Window(10, 10, Arm(), Arm())
    with pytest.raises(AssertionError):
        Histogram((1, 2))


def test_properties_are_counted_for_first_answers():
    lengths = of([5, 5, 900])
    arm = Arm(10, first_answers=3, cut_answers=2, ttft_ms=of([1] * 10), output_tokens=lengths)
    assert (arm.answers, arm.judged, arm.faults) == (10, 3, Count(0, 10))
    seen = comparisons(Window(0, 1, canary=arm, control=Arm(4)), Thresholds())
    assert seen[Metric.CUT_ANSWERS].suspect == Count(2, 3)
    assert seen[Metric.CUT_ANSWERS].reference == Count(0, 4), "all of an older telemetry service"
    with pytest.raises(AssertionError):
        Arm(10, first_answers=3, cut_answers=4)
