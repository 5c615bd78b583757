"""Tests that spans lie within their parents, and have unique and reproducible ids."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.tracecontext import attempt_traceparent
from sluice.wire.telemetry.v1.telemetry_pb2 import Attempt, RequestEvent, ToolCall
from telemetry.spans import is_notable, spans_of

TRACE, UID, CALLER = (
    "4bf92f3577b34da6a3ce929d0e0e4736",
    "0af7651916cd43dd8448eb211c80319c",
    "b7" * 8,
)
MICROS = st.integers(0, 2**32 - 1)
OUTCOMES = st.sampled_from(["stop", "replica_lost", "cancelled", "requeued", "deadline_exceeded"])
ATTEMPTS = st.lists(
    st.builds(
        Attempt,
        part=st.integers(0, 3),
        number=st.integers(0, 9),
        outcome=OUTCOMES,
        replica_id=st.sampled_from(["", "r"]),
        **dict.fromkeys(
            ("submitted_us", "first_us", "ended_us", "queue_us", "engine_queue_us"), MICROS
        ),
        load_us=MICROS,
        prefill_us=MICROS,
    ),
    max_size=6,
    unique_by=lambda it: (it.part, it.number),
)
EVENTS = st.builds(
    lambda **fields: event(**fields),
    attempts=ATTEMPTS,
    is_stream=st.booleans(),
    status=st.sampled_from([0, 200, 429, 503]),
    replica_id=st.sampled_from(["", "r"]),
    resumes=st.integers(0, 2),
    outcome=OUTCOMES,
    **dict.fromkeys(("gateway_us", "queue_us", "engine_queue_us", "load_us", "prefill_us"), MICROS),
    ttft_us=MICROS,
    total_us=MICROS,
)


def event(**fields: Any) -> RequestEvent:
    known = {
        "event_id": f"evt_{UID}",
        "trace_id": TRACE,
        "parent_span_id": CALLER,
        "received_at_unix_ms": 1_790_000_000_000,
        "endpoint": "/v1/chat/completions",
        "model": "m",
    }
    return RequestEvent(**known | fields)


@given(EVENTS)
def test_spans_lie_within_their_parents_and_are_told_apart(told: RequestEvent) -> None:
    found = spans_of(told)
    by_id = {span.span_id: span for span in found}
    assert len(by_id) == len(found)
    root, *others = found
    assert (root.trace_id, root.parent_id, root.span_id) == (TRACE, CALLER, UID[16:])
    assert root.is_server
    for span in others:
        parent = by_id[span.parent_id]
        assert parent.start_us <= span.start_us <= span.end_us <= parent.end_us
        assert int(span.span_id, 16) > 0
        assert (len(span.span_id), span.trace_id) == (16, TRACE)
    assert spans_of(RequestEvent.FromString(told.SerializeToString())) == found


def test_a_plain_request_has_all_its_stages_in_a_row() -> None:
    told = event(
        gateway_us=10, queue_us=20, engine_queue_us=5, load_us=3, prefill_us=30, ttft_us=70,
        total_us=100, is_stream=True, replica_id="r", outcome="stop", status=200, tracestate="v=1",
    )  # fmt: skip
    base = told.received_at_unix_ms * 1000
    times = [(it.name, it.start_us - base, it.end_us - base) for it in spans_of(told)]
    assert times == [
        ("chat m", 0, 100),
        ("gateway", 0, 10),
        ("attempt", 10, 100),
        ("queue", 10, 30),
        ("load", 30, 33),
        ("batch", 33, 35),
        ("prefill", 35, 70),
        ("decode", 70, 100),
    ]
    root = spans_of(told)[0]
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert (root.tracestate, root.error) == ("v=1", "")


def test_attempts_have_the_ids_that_routers_were_told() -> None:
    lost = Attempt(submitted_us=5, ended_us=50, outcome="replica_lost", reason="gone")
    done = Attempt(number=1, submitted_us=60, ended_us=90, outcome="stop")
    told = event(attempts=[lost, done], total_us=100, resumes=1, outcome="stop", status=200)
    root, *spans = spans_of(told)
    named = {it.name: it for it in spans if it.name in {"attempt", "resume"}}
    for name, number in (("attempt", 0), ("resume", 1)):
        parent = attempt_traceparent(f"00-{TRACE}-{root.span_id}-01", 0, number)
        assert parent.split("-")[2] == named[name].span_id
    assert (named["attempt"].error, named["resume"].error) == ("gone", "")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        # a long answer is not a slow one
        ({"status": 200, "ttft_us": 999, "total_us": 10**9}, False),
        ({"status": 200, "is_sampled": True}, False),
        ({"status": 503}, True),
        # the failure came after the first byte
        ({"status": 200, "outcome": "engine_failed"}, True),
        ({"status": 200, "outcome": "client_closed"}, False),
        ({"status": 200, "resumes": 1}, True),
        ({"status": 200, "ttft_us": 1000}, True),
        ({"status": 200, "total_us": 1000}, True),
        ({"status": 200, "ttft_us": 1, "itl_max_us": 1000}, True),
    ],
)
def test_slow_failed_and_resumed_requests_are_notable(fields: Any, wanted: bool) -> None:
    assert is_notable(event(**fields), 1000) is wanted


@pytest.mark.parametrize("trace_id", ["", "0" * 32, "x" * 32, TRACE[1:]])
def test_without_a_trace_there_are_no_spans_and_a_bad_parent_is_none(trace_id: str) -> None:
    assert spans_of(event(trace_id=trace_id)) == []
    assert spans_of(event(parent_span_id=trace_id))[0].parent_id == ""


def test_only_faults_of_the_server_are_errors_of_its_span() -> None:
    for code, error, status in (
        ("deadline_exceeded", "deadline_exceeded", 504),
        ("replica_lost", "replica_lost", 200),  # the failure came after the first byte
        ("client_closed", "", 499),
        ("client_closed", "", 200),
        ("slow_reader", "", 200),
        ("rate_limit_tokens", "", 429),
    ):
        root = spans_of(event(outcome=code, status=status))[0]
        assert (root.error, root.attributes["error.type"]) == (error, code)
    good = spans_of(event(outcome="content_filter", status=200))[0]
    assert (good.error, "error.type" in good.attributes) == ("", False)


def test_a_call_of_a_tool_is_a_span_below_the_request() -> None:
    call = ToolCall(name="weather", label="docs", duration_us=2_000, outcome="failed", attempts=1)
    event = RequestEvent(
        event_id="evt_" + "b" * 32,
        trace_id="a" * 32,
        parent_span_id="c" * 16,
        received_at_unix_ms=1_790_000_000_000,
        tool_call=call,
    )
    (span,) = spans_of(event)
    assert (span.name, span.parent_id, span.error) == ("execute_tool weather", "c" * 16, "failed")
    assert span.end_us - span.start_us == 2_000
    assert not span.is_server
