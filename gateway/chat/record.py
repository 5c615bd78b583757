"""Builds the record of a stored chat completion. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.bodies.messages import Message
from gateway.chat.keeper import KIND
from gateway.endpoints.chat_task import ChatTask
from sluice.wire.state.v1 import state_pb2 as wire


def completion_head(
    task: ChatTask, uid: str, *, model: str, created_unix_s: int, fingerprint: str
) -> dict[str, object]:
    """Return the fields that identify a completion, as in OpenAI's objects."""
    return {
        "id": f"{task.id_prefix}-{uid}",
        "object": task.kind,
        "created": created_unix_s,
        "model": model,
        "system_fingerprint": fingerprint,
        "service_tier": task.served_tier or "default",
    }


def record_of(
    sent: Sequence[Message],
    metadata: Mapping[str, str] | None,
    tenant_id: str,
    head: dict[str, object],
    choices: Sequence[dict[str, object]],
    usage: dict[str, object],
    created_at_unix_ms: int,
) -> wire.CreateRecordRequest:
    """Return the request that stores a completion with its messages.

    Args:
        sent: Messages of the request.
        metadata: Metadata of the request.
        tenant_id: Tenant that owns the completion.
        head: Fields that identify the completion, from `completion_head`.
        choices: Choices of the completion.
        usage: Usage of the completion.
        created_at_unix_ms: Time at which the completion is stored.
    """
    completion_id = str(head["id"])
    record = wire.Record(
        id=completion_id,
        tenant_id=tenant_id,
        kind=KIND,
        created_at_unix_ms=created_at_unix_ms,
        metadata=metadata or {},
        content=orjson.dumps(head | {"choices": [*choices], "usage": usage}),
        model=str(head["model"]),
    )
    items = list[wire.RecordItem]()
    for number, message in enumerate(sent):
        message_id = f"{completion_id}-{number}"
        told: dict[str, Any] = {"id": message_id, **message.model_dump(exclude_none=True)}
        items.append(wire.RecordItem(id=message_id, content=orjson.dumps(told)))
    return wire.CreateRecordRequest(record=record, items=items)
