"""Converts the event of a request to OpenTelemetry spans, without prompts and answers. Pure.

The request is a SERVER span, whose parent is the caller's span. Its children are the gateway's part
and one attempt per submission to a router. The children of an attempt are its stages. A stage that
is missing in the event has no span. Span ids are hashes of event fields, so an event that is
delivered twice results in identical spans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sluice import tracecontext
from sluice.errors import policy_of
from sluice.wire.telemetry.v1.telemetry_pb2 import Attempt, RequestEvent

Value = str | int | bool | Sequence[str]

_HTTP_ERROR = 400
_SERVER_ERROR = 500
# Number of the gateway's part, from which its span id is computed. Attempts begin at 1 << 16.
_GATEWAY_NUMBER = 1
_TRACE_DIGITS, _SPAN_DIGITS = 32, 16
_HEX = frozenset("0123456789abcdef")
# Last part of an endpoint's path -> operation name of OpenTelemetry's conventions.
_OPERATIONS = {
    "completions": "text_completion",
    "embeddings": "embeddings",
}
_CHAT = ("chat/completions", "messages")
_NAMED = {
    "sluice.request.id": "request_id",
    "sluice.tenant.id": "tenant_id",
    "sluice.key.id": "key_id",
    "sluice.tier.id": "tier_id",
    "sluice.gateway.id": "gateway_id",
    "sluice.pool.id": "pool_id",
    "sluice.release": "release",
    "sluice.rollout.id": "rollout_id",
    "sluice.guard.rules": "guard_rules",
    "sluice.guard.withheld_tokens": "withheld_tokens",
    "sluice.dropped_turns": "dropped_turns",
    "sluice.adapter.digest": "adapter_digest",
}
_GOOD = frozenset({"stop", "length", "tool_calls", "content_filter"})


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a trace.

    Attributes:
        trace_id: Id of the trace, 32 hex digits.
        span_id: Id of the span, 16 hex digits.
        parent_id: Id of the parent span, 16 hex digits, or empty without a parent.
        start_us: Start in Unix microseconds. `end_us` has the same unit.
        error: Code of the failure, or empty if there is none.
        is_server: Whether the span is the whole request, of kind SERVER. Other spans are internal.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_us: int
    end_us: int
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    error: str = ""
    is_server: bool = False
    tracestate: str = ""


def is_notable(event: RequestEvent, slow_us: int) -> bool:
    """Return whether a request failed, was resumed or was slow.

    The spans of such a request are exported even if it was not sampled. A client that disconnects
    after the first byte is not a failure.

    Args:
        event: The request's event.
        slow_us: Microseconds from which a request is slow, or 0 if no request counts as slow. The
            longest pause between tokens and the TTFT are compared with this limit. Without a TTFT,
            the total time is compared.
    """
    if event.status >= _HTTP_ERROR or _is_failure(event.outcome) or event.resumes:
        return True
    waited_us = max(event.ttft_us or event.total_us, event.itl_max_us)
    return 0 < slow_us <= waited_us


def _final_status(event: RequestEvent) -> int:
    """Return the status at the request's end. A stream that fails later has already sent 200."""
    policy = policy_of(event.outcome)
    if event.status >= _HTTP_ERROR or policy is None:
        return event.status if event.status >= _HTTP_ERROR else 0
    return policy.status


def _is_failure(outcome: str) -> bool:
    policy = policy_of(outcome)
    return policy is not None and policy.is_failure


def spans_of(event: RequestEvent) -> list[Span]:
    """Return the spans of a request, parents first. Empty if the request has no trace id."""
    if not _is_id(event.trace_id, _TRACE_DIGITS):
        return []
    if event.HasField("tool_call"):
        return [_tool_span(event)]
    root = _root(event)
    found = [root]
    if event.gateway_us:
        found.append(_child(root, "gateway", _GATEWAY_NUMBER, 0, event.gateway_us))
    for attempt in event.attempts or _only_attempt(event):
        found += _attempt_spans(root, attempt)
    return found


def _tool_span(event: RequestEvent) -> Span:
    """Return the span of a tool call, as a child of the span of its request's first round."""
    call, start_us = event.tool_call, event.received_at_unix_ms * 1000
    return Span(
        name=f"execute_tool {call.name}",
        trace_id=event.trace_id,
        span_id=tracecontext.request_span_id(event.event_id.removeprefix("evt_")),
        parent_id=event.parent_span_id if _is_id(event.parent_span_id, _SPAN_DIGITS) else "",
        start_us=start_us,
        end_us=start_us + call.duration_us,
        attributes={
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "sluice.tool.server": call.label,
            "sluice.tool.kind": call.kind,
            "sluice.tool.attempts": call.attempts,
            "sluice.tool.outcome": call.outcome,
            "sluice.request.id": event.request_id,
            "sluice.tenant.id": event.tenant_id,
            "sluice.gateway.id": event.gateway_id,
        },
        error="" if call.outcome == "answered" else call.outcome,
    )


def _root(event: RequestEvent) -> Span:
    operation = _operation(event.endpoint)
    start_us = event.received_at_unix_ms * 1000
    parent_id = event.parent_span_id if _is_id(event.parent_span_id, _SPAN_DIGITS) else ""
    # By OpenTelemetry's convention, an error of the client is not an error of a server span.
    is_error = _final_status(event) >= _SERVER_ERROR
    longest_us = max(event.total_us, event.ttft_us, event.gateway_us)
    ends = [attempt.ended_us for attempt in event.attempts]
    return Span(
        name=f"{operation} {event.requested_model or event.model}",
        trace_id=event.trace_id,
        span_id=tracecontext.request_span_id(event.event_id.removeprefix("evt_")),
        parent_id=parent_id,
        start_us=start_us,
        end_us=start_us + max(longest_us, *ends, 0),
        attributes=dict(_request_attributes(event, operation)),
        error=event.outcome if is_error else "",
        is_server=True,
        tracestate=event.tracestate,
    )


def _request_attributes(event: RequestEvent, operation: str) -> Iterator[tuple[str, Value]]:
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "sluice"
    yield "gen_ai.request.model", event.requested_model or event.model
    yield "gen_ai.response.model", event.model
    yield "gen_ai.response.id", event.request_id
    yield "gen_ai.usage.input_tokens", event.prompt_tokens
    yield "gen_ai.usage.output_tokens", event.output_tokens
    yield "gen_ai.usage.cache_read.input_tokens", event.cached_tokens
    if event.outcome in _GOOD and event.status < _HTTP_ERROR:
        yield "gen_ai.response.finish_reasons", [event.outcome]
    elif _final_status(event) >= _HTTP_ERROR:
        yield "error.type", event.outcome
    yield "http.request.method", "POST"
    yield "http.response.status_code", event.status
    yield "http.route", event.endpoint
    for name, field_name in _NAMED.items():
        if value := getattr(event, field_name):
            yield name, value
    yield "sluice.is_stream", event.is_stream
    yield "sluice.resumes", event.resumes
    yield "sluice.ttft_us", event.ttft_us
    yield "sluice.itl_max_us", event.itl_max_us
    if event.is_copy:
        yield "sluice.is_copy", True


def _only_attempt(event: RequestEvent) -> list[Attempt]:
    """Return the attempt of a request that has only one, because its event lists no attempts."""
    if not event.gateway_us or event.resumes:
        return []
    last_us = max(event.total_us, event.ttft_us, event.gateway_us)
    return [
        Attempt(
            cell_id=event.cell_id,
            router_id=event.router_id,
            replica_id=event.replica_id,
            submitted_us=event.gateway_us,
            # Without streaming, the first byte is sent at the end of the answer.
            first_us=event.ttft_us if event.is_stream else 0,
            ended_us=last_us,
            queue_us=event.queue_us,
            engine_queue_us=event.engine_queue_us,
            load_us=event.load_us,
            prefill_us=event.prefill_us,
            cached_tokens=event.cached_tokens,
            output_tokens=event.output_tokens,
            outcome=event.outcome,
        )
    ]


def _attempt_spans(root: Span, attempt: Attempt) -> Iterator[Span]:
    number = tracecontext.attempt_number(attempt.part, attempt.number)
    is_again = attempt.number > 0
    span = _child(
        root, "resume" if is_again else "attempt", number, attempt.submitted_us, attempt.ended_us
    )
    span.attributes.update(
        {
            "sluice.attempt.number": attempt.number,
            "sluice.attempt.answer": attempt.part,
            "sluice.attempt.outcome": attempt.outcome,
            "sluice.cell.id": attempt.cell_id,
            "sluice.router.id": attempt.router_id,
            "sluice.replica.id": attempt.replica_id,
            "sluice.attempt.output_tokens": attempt.output_tokens,
        }
    )
    if _is_failure(attempt.outcome):
        span.attributes["error.type"] = attempt.outcome
        span = replace(span, error=attempt.reason or attempt.outcome)
    yield span
    for place, (name, start_us, end_us) in enumerate(stage_times(attempt)):
        if end_us > start_us:
            stage = (place + 1) << tracecontext.STAGE_SHIFT
            yield _child(span, name, stage, start_us, end_us, of_us=root.start_us)


def stage_times(attempt: Attempt) -> list[tuple[str, int, int]]:
    """Return name, start and end of an attempt's stages, in microseconds since the arrival.

    Three processes measure the durations of stages, each by its own clock. So each stage starts at
    the end of the previous stage, and is cut at the first token or the end. Prefill includes the
    transfer of the first token, so that there are no gaps.
    """
    last_us = max(attempt.submitted_us, attempt.ended_us)
    if not attempt.replica_id:
        return [("queue", attempt.submitted_us, last_us)]
    first_us = min(attempt.first_us, last_us) or last_us
    found: list[tuple[str, int, int]] = []
    at_us = attempt.submitted_us
    lengths = (
        ("queue", attempt.queue_us),
        ("load", attempt.load_us),
        ("batch", max(0, attempt.engine_queue_us - attempt.load_us)),
    )
    for name, length_us in lengths:
        end_us = max(at_us, min(at_us + length_us, first_us))
        found.append((name, at_us, end_us))
        at_us = end_us
    prefilled_us = max(at_us, min(at_us + attempt.prefill_us, first_us))
    decode_us = prefilled_us if attempt.first_us == 0 and attempt.prefill_us else first_us
    found.append(("prefill", at_us, max(at_us, decode_us)))
    found.append(("decode", max(at_us, decode_us), last_us))
    return found


def _child(
    parent: Span, name: str, number: int, start_us: int, end_us: int, *, of_us: int | None = None
) -> Span:
    """Return a span within its parent. Start and end are relative to the request's arrival."""
    base_us = parent.start_us if of_us is None else of_us
    start_us = min(max(base_us + start_us, parent.start_us), parent.end_us)
    return Span(
        name=name,
        trace_id=parent.trace_id,
        span_id=tracecontext.child_span_id(parent.span_id, number),
        parent_id=parent.span_id,
        start_us=start_us,
        end_us=min(max(base_us + end_us, start_us), parent.end_us),
        tracestate=parent.tracestate,
    )


def _operation(endpoint: str) -> str:
    if endpoint.endswith(_CHAT):
        return "chat"
    return _OPERATIONS.get(endpoint.rpartition("/")[2], "generate_content")


def _is_id(text: str, digits: int) -> bool:
    return len(text) == digits and _HEX.issuperset(text) and text.strip("0") != ""
