"""Tickets of nodes: one for something else, or changed anywhere, opens nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.tickets import is_valid, write

DIGEST, OTHER = "ab" * 32, "cd" * 32
KEY, ANOTHER = bytes(range(32)), bytes(32)
KEYS = {7: KEY, 8: ANOTHER}
TICKET = write(7, KEY, DIGEST, "node.1:a", 1000)


def test_a_ticket_is_for_one_artifact_until_it_expires() -> None:
    assert is_valid(TICKET, KEYS, DIGEST, 999.9)
    assert not is_valid(TICKET, KEYS, OTHER, 999.9)
    assert not is_valid(TICKET, KEYS, DIGEST, 1000)
    assert not is_valid(TICKET, {8: KEY}, DIGEST, 1), "that key is gone"
    assert not is_valid(TICKET, {7: ANOTHER}, DIGEST, 1), "it is of another node"
    assert not is_valid(TICKET, {}, DIGEST, 1)


@given(
    st.text(max_size=80)
    | st.binary(max_size=80).map(lambda b: b.decode("utf-8", "surrogateescape"))
)
def test_anything_else_is_none(text: str) -> None:
    assert not is_valid(text, KEYS, DIGEST, 1)


@given(st.integers(0, len(TICKET) - 1), st.characters(codec="latin-1"))
def test_no_character_can_be_changed(position: int, character: str) -> None:
    changed = TICKET[:position] + character + TICKET[position + 1 :]
    assert is_valid(changed, KEYS, DIGEST, 1) == (changed == TICKET)


@pytest.mark.parametrize("ticket", ["", ".", "7.9.", "7.-9.a.b", f"7.{'9' * 4000}.a.b", "7.٣.a.b"])
def test_broken_ones(ticket: str) -> None:
    assert not is_valid(ticket, KEYS, DIGEST, 1)
