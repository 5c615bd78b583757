"""An id of a response says whose it is, and when it was made, to those who know the secret alone."""

import time

from hypothesis import given
from hypothesis import strategies as st

from sluice.response_ids import (
    belongs_to,
    created_unix_ms,
    is_response_id,
    item_stem,
    new_response_id,
)
from sluice.shared_secret import SharedSecret

OLD, NEW = "o" * 32, "n" * 32
SECRET = SharedSecret([OLD])
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def test_it_is_one_tenants_and_tells_when() -> None:
    before_ms = time.time_ns() // 1_000_000
    made = new_response_id("acme", SECRET)
    assert is_response_id(made)
    assert before_ms <= created_unix_ms(made) <= time.time_ns() // 1_000_000
    assert belongs_to(made, "acme", SECRET)
    assert not belongs_to(made, "other", SECRET)
    assert made.startswith(f"resp_{item_stem(made)}")


@given(st.integers(5, 46), st.sampled_from(ALPHABET))
def test_a_changed_id_belongs_to_no_tenant(place: int, character: str) -> None:
    made = new_response_id("acme", SECRET)
    changed = made[:place] + character + made[place + 1 :]
    assert belongs_to(changed, "acme", SECRET) == (changed == made)


@given(st.text(max_size=60))
def test_anything_else_is_none(text: str) -> None:
    assert not belongs_to(text, "acme", SECRET)
    assert not belongs_to(f"resp_{text}", "acme", SECRET)


def test_while_a_secret_is_replaced_ids_of_both_are_good() -> None:
    old = new_response_id("acme", SECRET)
    both = SharedSecret([NEW, OLD])
    assert belongs_to(old, "acme", both)
    assert belongs_to(new_response_id("acme", both), "acme", SharedSecret([NEW]))
    assert not belongs_to(old, "acme", SharedSecret([NEW]))
    assert not is_response_id("resp_" + "z" * 42), "a time that no calendar has"
