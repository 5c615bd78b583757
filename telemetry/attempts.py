"""Converts the attempts of requests from events to rows of `attempts`, and rows to JSON.

An attempt is one placement of an answer on a replica.
"""

from base64 import b64decode
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from sluice.wire.router.v1.router_pb2 import Explanation
from sluice.wire.telemetry.v1.telemetry_pb2 import Attempt, RequestEvent

# largest number of attempts stored per event, more than the 16 that gateways report
ATTEMPTS_MAX = 64
# Column -> type, in the order of the insert. The first three columns are fields of the event.
_OF_EVENT = {
    "event_id": "String",
    "received_at": "DateTime64(3, 'UTC')",
    "tenant_id": "LowCardinality(String)",
}
_COPIED = {
    **dict.fromkeys(("part", "number"), "UInt32"),
    **dict.fromkeys(("cell_id", "router_id", "replica_id"), "LowCardinality(String)"),
    **dict.fromkeys(
        (
            *("submitted_us", "first_us", "ended_us", "queue_us", "engine_queue_us", "load_us"),
            *("prefill_us", "cached_tokens", "output_tokens"),
        ),
        "UInt32",
    ),
    "outcome": "LowCardinality(String)",
    "reason": "String",
}
# The column `decision` has the bytes of the router's `Explanation`.
COLUMNS: dict[str, str] = _OF_EVENT | _COPIED | {"decision": "String"}


def columns(events: Sequence[RequestEvent]) -> list[list[Any]]:
    """Return one list of values per column of `COLUMNS`. All are empty if no event has attempts."""
    found: list[list[Any]] = [[] for _ in COLUMNS]
    for event in events:
        for attempt in event.attempts[:ATTEMPTS_MAX]:
            for column, value in zip(found, _row(event, attempt), strict=True):
                column.append(value)
    return found


def _row(event: RequestEvent, attempt: Attempt) -> list[Any]:
    return [
        *(event.event_id, event.received_at_unix_ms, event.tenant_id),
        *(getattr(attempt, name) for name in _COPIED),
        attempt.decision,
    ]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `attempts` in the form of the API. The given row's decision is base64."""
    return {name: row[name] for name in _COPIED} | {"decision": _decision(row["decision"])}


def _decision(text: str) -> dict[str, Any] | None:
    """Return a router's explanation as JSON, or None if it is missing or cannot be decoded."""
    if not text:
        return None
    try:
        decision = Explanation.FromString(b64decode(text))
    except DecodeError:
        return None
    return MessageToDict(decision, preserving_proto_field_name=True)
