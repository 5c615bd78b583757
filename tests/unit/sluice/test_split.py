"""The split of a model's traffic: even, sticky, the same in every process, first the pins."""

import os
import subprocess
import sys
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from sluice.split import SHARE_MAX, ReleaseChoice, ReleaseSplit, bucket

texts = st.text(max_size=20)
shares = st.integers(0, SHARE_MAX)
# The 99.99 % quantile of chi-square with 99 degrees of freedom; the seeds are fixed.
CHI_SQUARE_99 = 161.3


def split(share: int, salt: str = "salt", **changes: object) -> ReleaseSplit:
    return ReleaseSplit("model", "old", "new", share, salt, **changes)  # type: ignore[arg-type]


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


@given(texts, texts, texts, texts)
def test_a_bucket_is_in_range(model: str, salt: str, tenant: str, key: str):
    assert 0 <= bucket(model, salt, tenant, key) < SHARE_MAX


@given(texts, texts, texts, shares, shares)
def test_a_canary_session_stays_while_the_share_grows(
    tenant: str, session: str, request: str, one: int, other: int
):
    less, more = sorted((one, other))
    if split(less).choose(tenant, session, request).is_canary:
        assert split(more).choose(tenant, session, request).is_canary


@given(texts, texts, texts)
def test_a_share_of_zero_is_none_and_of_one_is_all(tenant: str, session: str, request: str):
    assert split(0).choose(tenant, session, request) == ReleaseChoice("old", is_canary=False)
    assert split(SHARE_MAX).choose(tenant, session, request) == ReleaseChoice("new", is_canary=True)


@given(shares, texts, st.text(min_size=1, max_size=20), texts, texts)
def test_a_session_stays_together(share: int, tenant: str, session: str, one: str, other: str):
    chosen = split(share).choose
    assert chosen(tenant, session, one) == chosen(tenant, session, other)


@given(shares, texts, texts)
def test_pins_come_first(share: int, session: str, request: str):
    pinned = split(share, pins={"careful": "old", "eager": "new", "odd": "older"})
    assert pinned.choose("careful", session, request) == ReleaseChoice("old", False, True)
    assert pinned.choose("eager", session, request) == ReleaseChoice("new", True, True)
    assert pinned.choose("odd", session, request) == ReleaseChoice("older", False, True)
    assert pinned.choose("x", session, request) == split(share).choose("x", session, request)


def test_parts_are_not_run_together():
    parts = [("ab", "c", "", ""), ("a", "bc", "", ""), ("a", "b", "c", ""), ("", "a", "b", "c")]
    assert len({bucket(*case) for case in parts}) == len(parts)


def test_buckets_are_even():
    for salt in ("one", "two", "three"):
        counts = [0] * 100
        for number in range(50_000):
            counts[bucket("model", salt, "tenant", f"session-{number}") // 100] += 1
        assert chi_square(counts) < CHI_SQUARE_99


def test_rollouts_are_independent_of_each_other():
    """Where a session lies in one rollout says nothing of where it lies in the next."""
    counts = [0] * 100
    for number in range(50_000):
        first, second = (bucket("m", salt, "t", str(number)) // 1000 for salt in ("one", "two"))
        counts[10 * first + second] += 1
    assert chi_square(counts) < CHI_SQUARE_99


def test_tenants_and_models_are_independent_too():
    here = [bucket("m", "salt", "t", str(number)) < 100 for number in range(50_000)]
    for model, tenant in (("n", "t"), ("m", "u")):
        there = [bucket(model, "salt", tenant, str(number)) < 100 for number in range(50_000)]
        both = sum(a and b for a, b in zip(here, there, strict=True))
        assert both < 20, "1 % of 1 % of 50,000 are 5"


def test_every_process_says_the_same():
    cases = list(product(("m", "né"), ("salt",), ("", "t"), ("s1", "s2")))
    code = f"from sluice.split import bucket; print([bucket(*case) for case in {cases!r}])"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert told == {str([bucket(*case) for case in cases])}


def test_buckets_never_change():
    """Written down: another value would move sessions in the middle of a rollout."""
    assert [bucket("model", "salt", "tenant", f"session-{n}") for n in range(4)] == [
        1295,
        2082,
        7900,
        8431,
    ]
