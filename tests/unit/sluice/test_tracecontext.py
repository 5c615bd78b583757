"""W3C Trace Context: what is not valid is ignored, what is passed on is bounded, ids follow."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice import tracecontext
from sluice.tracecontext import NONE, STATE_MAX, Upstream

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"
HEX16 = st.integers(1, (1 << 64) - 1).map("{:016x}".format)


def test_a_valid_context_is_read_with_its_state() -> None:
    assert tracecontext.read([VALID], ["a=1", "0b@c=2 3 , d=4"]) == Upstream(
        TRACE, SPAN, True, "a=1,0b@c=2 3,d=4"
    )
    assert not tracecontext.read([f"00-{TRACE}-{SPAN}-02"]).is_sampled  # another flag
    assert tracecontext.read([f"cc-{TRACE}-{SPAN}-01-what-comes-then"]).trace_id == TRACE


@pytest.mark.parametrize(
    "given_headers",
    [
        [],
        [VALID, VALID],
        [""],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE}-{SPAN}-01-more"],
        [VALID.upper()],
        [VALID + "\n"],
    ],
)
def test_an_invalid_parent_takes_its_state_with_it(given_headers: list[str]) -> None:
    assert tracecontext.read(given_headers, ["a=1"]) == NONE


@pytest.mark.parametrize(
    "state",
    ["a", "=1", "A=1", "0a=1", "a=", "a=1,a=2", "a=é", "a=b=c", "a=1\x00", "a=" + "x" * 9000],
)
def test_an_invalid_state_is_left_out_alone(state: str) -> None:
    assert tracecontext.read([VALID], [state]) == Upstream(TRACE, SPAN, True)


def test_of_a_long_state_long_members_go_first_and_then_the_last() -> None:
    assert tracecontext.bounded_state(
        ["a=1,long=" + "x" * 250 + ",other=" + "y" * 250 + ",b=2"]
    ) == ("a=1,b=2")
    many = [f"k{number}=" + "v" * 100 for number in range(10)]
    assert tracecontext.bounded_state(many) == ",".join(many[:4])
    assert tracecontext.bounded_state([f"k{number}=1" for number in range(33)]) == ""


@given(st.lists(st.text(string.printable, max_size=300), max_size=6))
def test_a_passed_on_context_is_valid_and_bounded(states: list[str]) -> None:
    kept = tracecontext.bounded_state(states)
    assert len(kept) <= STATE_MAX
    assert kept.isascii()
    assert tracecontext.bounded_state([kept]) == kept


@given(HEX16, st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), unique=True))
def test_spans_of_attempts_have_ids_of_their_own(root: str, places: list[tuple[int, int]]) -> None:
    parents = [
        tracecontext.attempt_traceparent(f"00-{TRACE}-{root}-01", part, number)
        for part, number in places
    ]
    ids = {tracecontext.read([parent]).span_id for parent in parents}
    assert len(ids) == len(places)
    assert root not in ids
    assert all(tracecontext.is_sampled(parent) for parent in parents)


def test_the_span_of_a_request_follows_from_its_id() -> None:
    assert tracecontext.request_span_id(TRACE) == TRACE[16:]
    copied = tracecontext.request_span_id(f"{TRACE}-copy")
    assert (len(copied), copied) == (16, tracecontext.request_span_id(f"{TRACE}-copy"))
    assert tracecontext.request_span_id("0" * 32) != "0" * 16
