"""Converts the events of server tool calls to rows of `tool_calls`. Pure."""

from collections.abc import Sequence
from typing import Any

from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

# Column -> type, in the order of the insert. These columns are fields of the event itself.
_OF_EVENT = {
    "event_id": "String",
    "received_at": "DateTime64(3, 'UTC')",
    **dict.fromkeys(("request_id", "trace_id"), "String"),
    "tenant_id": "LowCardinality(String)",
    "key_id": "String",
    **dict.fromkeys(("model", "gateway_id", "endpoint"), "LowCardinality(String)"),
}
COPIED = {
    "tool_id": "String",
    **dict.fromkeys(("kind", "label", "name"), "LowCardinality(String)"),
    "attempts": "UInt32",
    "duration_us": "UInt64",
    "outcome": "LowCardinality(String)",
    **dict.fromkeys(("output_bytes", "price_micros"), "UInt32"),
}
COLUMNS: dict[str, str] = _OF_EVENT | COPIED
_RENAMED = {"received_at": "received_at_unix_ms"}


def columns(calls: Sequence[RequestEvent]) -> list[Sequence[Any]]:
    """Return one list of values per column of `COLUMNS`, with times in milliseconds."""
    return [
        *([getattr(it, _RENAMED.get(name, name)) for it in calls] for name in _OF_EVENT),
        *([getattr(it.tool_call, name) for it in calls] for name in COPIED),
    ]
