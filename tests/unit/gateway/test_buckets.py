"""Buckets never grant more than they hold plus what refills, and who waits is served."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.buckets import BucketScope, decide_locally, part
from gateway.limits.headers import duration
from gateway.limits.verdict import Verdict
from sluice.limits import BY_NUMBER

MINUTE_MS = 60_000

steps = st.lists(
    st.tuples(st.floats(0, 30_000), st.integers(0, 80), st.integers(0, 120)),
    min_size=1,
    max_size=40,
)


@dataclass(frozen=True)
class Limits:
    rpm: int = 0
    tpm: int = 0
    requests_max: int = 0

    def scope(self, name: str = "a") -> BucketScope:
        return BucketScope(name, name, rpm=self.rpm, tpm=self.tpm, requests_max=self.requests_max)


def refused_by(verdict: Verdict) -> str:
    """Return the kind of limit that refused; empty: it was granted."""
    return BY_NUMBER[verdict[0]].name if verdict[0] else ""


limits = st.builds(Limits, st.integers(0, 20), st.integers(0, 100))


@given(limits=limits, steps=steps, share=st.sampled_from((1.0, 0.5, 0.1)))
def test_grants_stay_within_capacity_plus_refill(
    limits: Limits, steps: list[tuple[float, int, int]], share: float
) -> None:
    scope, now_ms, requests, tokens = limits.scope(), 1e6, 0, 0
    rpm, tpm = part(limits.rpm, share), part(limits.tpm, share)
    began_ms = now_ms
    for pause_ms, need, _ in steps:
        now_ms += pause_ms
        if not refused_by(decide_locally([scope], need, share, now_ms)):
            requests += 1
            tokens += min(need, tpm)
        minutes = (now_ms - began_ms) / MINUTE_MS
        assert not rpm or requests <= rpm * (1 + minutes) + 1e-6
        assert not tpm or tokens <= tpm * (1 + minutes) + 1e-6


@given(limits=limits, steps=steps)
def test_settled_use_is_paid_for_in_the_end(
    limits: Limits, steps: list[tuple[float, int, int]]
) -> None:
    """Beyond capacity and refill, only what one settlement adds to its reservation slips through."""
    scope, now_ms, used_total, slack = limits.scope(), 1e6, 0, 0
    for pause_ms, need, used in steps:
        now_ms += pause_ms
        if not refused_by(decide_locally([scope], need, 1.0, now_ms)):
            scope.settle_local(min(need, limits.tpm), used, was_served=True)
            used_total += used
            slack = max(slack, used)
        refill = (now_ms - 1e6) / MINUTE_MS
        assert not limits.tpm or used_total <= limits.tpm * (1 + refill) + slack + 1e-6


@given(limits=limits, steps=steps)
def test_a_refused_caller_that_waits_is_served(
    limits: Limits, steps: list[tuple[float, int, int]]
) -> None:
    scope, now_ms = limits.scope(), 1e6
    for pause_ms, need, _ in steps:
        now_ms += pause_ms
        verdict = decide_locally([scope], need, 1.0, now_ms)
        if refused_by(verdict):
            now_ms += verdict[2] + 1e-6
            assert not refused_by(decide_locally([scope], need, 1.0, now_ms))


@given(need=st.integers(0, 50))
def test_all_scopes_or_none(need: int) -> None:
    free, full = Limits(10, 100).scope("free"), Limits(1).scope("full")
    assert not refused_by(decide_locally([full], 0, 1.0, 1e6))
    verdict = decide_locally([free, full], need, 1.0, 1e6)
    assert (refused_by(verdict), verdict[1]) == ("rpm", 1)
    assert free.refill(1.0, 1e6) == {"rpm": 10, "tpm": 100}


def test_requests_at_once_end_before_others_begin() -> None:
    scope = Limits(requests_max=4).scope()
    granted = 0
    while not refused_by(decide_locally([scope], 10, 0.5, 1e6)):
        scope.held += 1
        granted += 1
    assert granted == 2, "half of 4"
    assert refused_by(decide_locally([scope], 10, 0.5, 1e6)) == "requests_max"
    scope.settle_local(0, 10, was_served=True)
    assert not refused_by(decide_locally([scope], 10, 0.5, 1e6))


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32), st.booleans()), max_size=9)
)
def test_the_reported_use_equals_the_use(used: list[tuple[int, int, bool]]) -> None:
    scope, now_ms, told = Limits(tpm=2**32 - 1, rpm=2**32 - 1).scope(), 1e6, 0
    for reserved, spent, is_told_between in used:
        now_ms += 24 * 3600 * 1000
        if refused_by(decide_locally([scope], reserved, 1.0, now_ms)):
            continue
        if is_told_between:
            told += scope.take_changes()[3]
        scope.settle_local(reserved, spent, was_served=True)
        told -= spent
    assert told + scope.take_changes()[3] == 0
    assert scope.take_changes() == (0, 0, 0, 0)


def test_a_share_is_never_without_limit() -> None:
    assert part(5, 0.01) == 1
    assert part(0, 0.01) == 0


def test_durations_as_openai_writes_them() -> None:
    assert [duration(ms) for ms in (-5, 0, 120, 7520, 60_000, 90_000, 3_600_000)] == [
        "0ms", "0ms", "120ms", "7.5s", "1m0s", "1m30s", "60m0s",
    ]  # fmt: skip
