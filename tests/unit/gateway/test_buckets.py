"""Buckets never grant more than they hold plus what refills, and who waits is served."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.buckets import LocalBuckets, Scope
from gateway.limits.limiter import duration

steps = st.lists(
    st.tuples(st.floats(0, 30), st.integers(0, 80), st.integers(0, 120)), min_size=1, max_size=40
)
scopes = st.builds(Scope, st.just("a"), st.integers(0, 20), st.integers(0, 100))


@given(scope=scopes, steps=steps)
def test_grants_stay_within_capacity_plus_refill(
    scope: Scope, steps: list[tuple[float, int, int]]
) -> None:
    buckets, now_s, requests, tokens = LocalBuckets(share=1.0), 0.0, 0, 0
    for pause_s, need, _ in steps:
        now_s += pause_s
        if buckets.reserve([scope], need, now_s).is_granted:
            requests += 1
            tokens += min(need, scope.tpm)
        refill = now_s / 60
        assert not scope.rpm or requests <= scope.rpm * (1 + refill) + 1e-6
        assert not scope.tpm or tokens <= scope.tpm * (1 + refill) + 1e-6


@given(scope=scopes, steps=steps)
def test_settled_use_is_paid_for_in_the_end(
    scope: Scope, steps: list[tuple[float, int, int]]
) -> None:
    """Beyond capacity and refill, only what one settlement adds to its reservation slips through."""
    buckets, now_s, used_total, slack = LocalBuckets(share=1.0), 0.0, 0, 0
    for pause_s, need, used in steps:
        now_s += pause_s
        if buckets.reserve([scope], need, now_s).is_granted:
            buckets.settle([scope], need, used, 0, now_s)
            used_total += used
            slack = max(slack, used)
        assert not scope.tpm or used_total <= scope.tpm * (1 + now_s / 60) + slack + 1e-6


@given(scope=scopes, steps=steps)
def test_a_refused_caller_that_waits_is_served(
    scope: Scope, steps: list[tuple[float, int, int]]
) -> None:
    buckets, now_s = LocalBuckets(share=1.0), 0.0
    for pause_s, need, _ in steps:
        now_s += pause_s
        verdict = buckets.reserve([scope], need, now_s)
        if not verdict.is_granted:
            now_s += verdict.wait_s + 1e-6
            assert buckets.reserve([scope], need, now_s).is_granted


@given(need=st.integers(0, 50))
def test_all_scopes_or_none(need: int) -> None:
    buckets = LocalBuckets(share=1.0)
    free, full = Scope("free", 10, 100), Scope("full", 1, 0)
    assert buckets.reserve([full], 0, 0.0).is_granted
    before = buckets.levels.get("free")
    verdict = buckets.reserve([free, full], need, 0.0)
    assert not verdict.is_granted
    assert verdict.is_request_limit
    assert buckets.levels.get("free") == before


def test_a_share_is_never_without_limit_and_memory_is_bounded() -> None:
    buckets = LocalBuckets(share=0.01, scopes_max=3)
    assert buckets.reserve([Scope("a", 5, 0)], 1, 0.0).is_granted
    assert not buckets.reserve([Scope("a", 5, 0)], 1, 0.0).is_granted
    for name in "bcdef":
        buckets.reserve([Scope(name, 5, 0)], 1, 0.0)
    assert list(buckets.levels) == ["d", "e", "f"]


def test_durations_as_openai_writes_them() -> None:
    assert [duration(s) for s in (0, 0.12, 7.52, 60, 90, 3600)] == [
        "0ms", "120ms", "7.5s", "1m0s", "1m30s", "60m0s",
    ]  # fmt: skip
