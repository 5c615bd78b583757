"""Decodes messages into rows of `texts`, as `telemetry.rows` does for events. Pure.

An invalid message is stored without its payload. The payload may contain a tenant's text, but the
tenant and the time at which to delete it are unknown.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from sluice.wire.telemetry.v1.text_pb2 import TextEvent
from telemetry.rows import (
    RECEIVED_MAX_MS,
    RECEIVED_MIN_MS,
    BrokerMessage,
    Poison,
    PoisonReason,
    RowBatch,
)

SCHEMA_VERSION = 1
RETENTION_DAYS_MAX = 366
_DAY_MS = 86_400_000

COLUMNS: dict[str, str] = {
    "event_id": "String",
    "received_at": "DateTime64(3, 'UTC')",
    "tenant_id": "LowCardinality(String)",
    "request_id": "String",
    "model": "LowCardinality(String)",
    "endpoint": "LowCardinality(String)",
    "prompt": "String",
    "answers": "String",
    "is_prompt_cut": "Bool",
    "is_answer_cut": "Bool",
    "redactions": "Map(LowCardinality(String), UInt32)",
    "outcome": "LowCardinality(String)",
    "expires_at": "DateTime('UTC')",
}


def decode(messages: Iterable[BrokerMessage]) -> RowBatch:
    """Decode messages into texts. Invalid messages become poison."""
    batch = RowBatch()
    seen: set[str] = set()
    for message in messages:
        if not message.is_genuine:
            batch.forged += 1
            continue
        found = _decode_one(message)
        if isinstance(found, Poison):
            batch.poisons.append(found)
        elif found.event_id in seen:
            batch.duplicates += 1
        else:
            seen.add(found.event_id)
            batch.texts.append(found)
    return batch


def columns(texts: Sequence[TextEvent]) -> list[Sequence[Any]]:
    """Return one list of values per column of `COLUMNS`, with times as integers."""
    return [list(column) for column in zip(*map(_row, texts), strict=True)]


def _row(text: TextEvent) -> tuple[Any, ...]:
    return (
        *(text.event_id, text.received_at_unix_ms, text.tenant_id, text.request_id, text.model),
        *(text.endpoint, text.prompt, text.answers, text.is_prompt_cut, text.is_answer_cut),
        *(dict(text.redactions), text.outcome, text.expires_at_unix_ms // 1000),
    )


def _decode_one(message: BrokerMessage) -> TextEvent | Poison:
    try:
        text = TextEvent.FromString(message.payload)
    except DecodeError:
        return _parked(message, PoisonReason.UNDECODABLE, "it is no text event")
    if text.schema_version != SCHEMA_VERSION:
        detail = f"schema version {text.schema_version}, this sink knows {SCHEMA_VERSION}"
        return _parked(message, PoisonReason.UNKNOWN_SCHEMA, detail)
    problem = _problem(text)
    return text if problem is None else _parked(message, PoisonReason.INVALID, problem)


def _parked(message: BrokerMessage, reason: PoisonReason, detail: str) -> Poison:
    size = len(message.payload)
    return Poison(
        message._replace(payload=b""), reason, f"text of {size} bytes, not kept: {detail}"
    )


def _problem(text: TextEvent) -> str | None:
    if not text.event_id or not text.tenant_id:
        return "event_id or tenant_id is empty"
    received_ms, expires_ms = text.received_at_unix_ms, text.expires_at_unix_ms
    if not RECEIVED_MIN_MS <= received_ms < RECEIVED_MAX_MS:
        return f"received_at_unix_ms {received_ms} is not between 2020 and 2100"
    if not received_ms < expires_ms <= received_ms + RETENTION_DAYS_MAX * _DAY_MS:
        return f"it goes after {(expires_ms - received_ms) / _DAY_MS:.1f} days, not 0 to 366"
    return None
