"""Converts events about `auto` to rows: choices of a model, and feedback on answers. Pure.

`auto` is the public name for which a gateway chooses a model per request.
"""

from collections.abc import Sequence
from typing import Any

from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

# largest number of options stored per choice, and of options that a policy may have
OPTIONS_MAX = 16
# Column -> type, in the order of the insert.
CHOICE_COLUMNS: dict[str, str] = {
    **dict.fromkeys(("event_id", "request_id"), "String"),
    "received_at": "DateTime64(3, 'UTC')",
    **dict.fromkeys(("tenant_id", "model", "reason"), "LowCardinality(String)"),
    **dict.fromkeys(("scheme", "cluster"), "UInt32"),
    **dict.fromkeys(("models", "releases"), "Array(LowCardinality(String))"),
    **dict.fromkeys(("costs", "qualities", "propensities"), "Array(Float64)"),
}
FEEDBACK_COLUMNS: dict[str, str] = {
    "tenant_id": "LowCardinality(String)",
    "answer": "String",
    "good": "Float64",
    "judged_at": "DateTime64(3, 'UTC')",
}


def choice_columns(events: Sequence[RequestEvent]) -> list[list[Any]]:
    """Return one list of values per column of `CHOICE_COLUMNS`, with times in milliseconds."""
    found: list[list[Any]] = [[] for _ in CHOICE_COLUMNS]
    for event in events:
        if not event.HasField("auto"):
            continue
        for column, value in zip(found, _row(event), strict=True):
            column.append(value)
    return found


def feedback_columns(events: Sequence[RequestEvent]) -> list[list[Any]]:
    """Return one list of values per column of `FEEDBACK_COLUMNS`, with times in milliseconds."""
    return [
        [event.tenant_id for event in events],
        [event.feedback.answer for event in events],
        [event.feedback.good for event in events],
        [event.received_at_unix_ms for event in events],
    ]


def _row(event: RequestEvent) -> list[Any]:
    told = event.auto
    options = told.options[:OPTIONS_MAX]
    return [
        *(event.event_id, event.request_id, event.received_at_unix_ms, event.tenant_id),
        *(told.model, told.reason, told.scheme, told.cluster),
        [it.model for it in options],
        [it.release for it in options],
        [it.cost for it in options],
        [it.quality for it in options],
        [it.propensity for it in options],
    ]
