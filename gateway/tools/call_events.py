"""The usage event of one tool call, with facts for the ledger and the trace but no text. Pure."""

from typing import NamedTuple

from gateway.directory import Principal
from gateway.tools.plan import PlannedTool
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

_SCHEMA_VERSION = 5
_U32_MAX = 0xFFFFFFFF


class CallFacts(NamedTuple):
    """A tool call that has ended or was refused.

    Attributes:
        uid: Id, unique among all calls.
        began_at_unix_ms: Start of the first attempt, in Unix milliseconds.
        duration_s: Seconds of all attempts together.
        attempts: Number of attempts, or 0 if the call was not run.
        output_bytes: Bytes of the output sent to the model.
        outcome: One of answered, failed, refused or cut.
    """

    uid: str
    began_at_unix_ms: int
    duration_s: float
    attempts: int
    output_bytes: int
    outcome: str


def event_of(
    facts: CallFacts,
    tool: PlannedTool,
    principal: Principal,
    *,
    request_id: str,
    trace_id: str,
    parent_span_id: str,
    is_sampled: bool,
    model: str,
    endpoint: str,
    gateway_id: str,
) -> bytes:
    """Return the serialized usage event of a tool call."""
    event = RequestEvent(
        schema_version=_SCHEMA_VERSION,
        event_id=f"evt_{facts.uid}",
        received_at_unix_ms=facts.began_at_unix_ms,
        request_id=request_id,
        trace_id=trace_id,
        parent_span_id=parent_span_id,
        is_sampled=is_sampled,
        tenant_id=principal.tenant.id,
        key_id=principal.key.id,
        tier_id=principal.tier.id,
        model=model,
        endpoint=endpoint,
        gateway_id=gateway_id,
    )
    call = event.tool_call
    call.tool_id, call.label, call.name = tool.target.tool_id, tool.label, tool.name
    call.kind = "mcp" if tool.target.is_mcp else "http"
    call.attempts = facts.attempts
    call.duration_us = max(0, round(facts.duration_s * 1e6))
    call.outcome = facts.outcome
    call.output_bytes = min(_U32_MAX, facts.output_bytes)
    call.price_micros = tool.price_micros if facts.attempts else 0
    return event.SerializeToString()
