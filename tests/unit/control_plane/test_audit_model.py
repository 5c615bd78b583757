"""Idempotency keys, and what may be recorded."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.audit.model import (
    KeptAnswer,
    check_replay,
    checked_key,
    fingerprint,
    in_progress,
    lock_number,
    recordable,
)
from sluice.errors import BadRequestError, ErrorCode, PlatformError


def test_a_key_is_for_one_request() -> None:
    request = ("PUT", "/v1/tiers/a", b"{}", ("", ""))
    others = [
        ("DELETE", "/v1/tiers/a", b"{}", ("", "")),
        ("PUT", "/v1/tiers/b", b"{}", ("", "")),
        ("PUT", "/v1/tiers/a", b"{} ", ("", "")),
        ("PUT", "/v1/tiers/a", b"{}", ("*", "")),
        ("PUT", "/v1/tiers/a", b"{}", ("", "*")),
        ("PUT/v1", "/tiers/a", b"{}", ("", "")),
    ]
    prints = {fingerprint(*asked) for asked in (request, *others)}
    assert len(prints) == 1 + len(others)
    kept = KeptAnswer(fingerprint(*request), 201, "{}", is_secret=False, object_id="a")
    check_replay(kept, fingerprint(*request))
    for other in others:
        with pytest.raises(PlatformError) as refusal:
            check_replay(kept, fingerprint(*other))
        assert refusal.value.code is ErrorCode.IDEMPOTENCY_KEY_REUSED


def test_a_secret_is_not_shown_again() -> None:
    kept = KeptAnswer(b"x", 201, "", is_secret=True, object_id="key_1")
    with pytest.raises(PlatformError, match="rotate it to see a new text") as refusal:
        check_replay(kept, b"x")
    assert refusal.value.code is ErrorCode.CONFLICT
    assert "key_1" in refusal.value.message


def test_an_early_retry_gets_the_time_to_come_back() -> None:
    assert (in_progress().code, in_progress().retry_after_s) == (ErrorCode.CONFLICT, 1.0)


@pytest.mark.parametrize("text", ["", "a b", "ä", "x" * 129, "a\n"])
def test_malformed_idempotency_keys_are_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="Idempotency-Key"):
        checked_key(text)
    assert checked_key("x" * 128) == "x" * 128


def test_locks_of_different_keys_differ() -> None:
    numbers = {lock_number(*pair) for pair in itertools.product(("a", "a\nb", "ab"), "abc")}
    assert len(numbers) == 9
    assert all(-(2**63) <= number < 2**63 for number in numbers)


@given(st.text())
def test_recorded_objects_can_be_stored_and_hold_no_key(text: str) -> None:
    recorded = recordable(f"{text}sk-sluice-admin-S3cr3t_x{text}" + "y" * 600)
    assert "S3cr3t" not in recorded
    assert "\0" not in recorded
    assert len(recorded) <= 512
    recorded.encode()
