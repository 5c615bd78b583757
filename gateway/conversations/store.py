"""Stores conversations and their items as records of tenants."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter

from gateway.bodies.messages import MESSAGES_MAX
from gateway.bodies.mistakes import bad_value
from gateway.bodies.response_items import InputItem, stored_items
from gateway.records.client import missing
from gateway.records.sealed import SealedRecords
from sluice.ids import new_id
from sluice.stored_content import CONVERSATION
from sluice.wire.state.v1 import state_pb2 as wire

_PREFIX = "conv"
_BYTES_MAX = 3 << 20  # bytes of the items in one request, below gRPC's 4 MiB per message
# Maximum size in bytes of a conversation's items. A response cannot continue a larger one.
_CONTEXT_BYTES_MAX = 16 << 20
_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


class ConversationStore:
    """The conversations of all tenants, as one worker reads and writes them.

    All methods raise NOT_FOUND for an unknown id. Other errors are those of `RecordClient`.
    """

    def __init__(self, records: SealedRecords) -> None:
        self._records = records

    def require(self, tenant_id: str, conversation_id: str, param: str | None = None) -> None:
        """Raise NOT_FOUND unless the tenant owns the id."""
        self._records.require(conversation_id, _PREFIX, tenant_id, param)

    async def begin(
        self, tenant_id: str, items: Sequence[InputItem], metadata: Mapping[str, str]
    ) -> wire.Record:
        """Create a conversation and return its record."""
        record = wire.Record(
            id=self._records.new_id(_PREFIX, tenant_id),
            tenant_id=tenant_id,
            kind=CONVERSATION,
            created_at_unix_ms=time.time_ns() // 1_000_000,
            metadata=metadata,
            content=b"{}",
        )
        await self._records.create(record, _record_items(new_items(items), "items"))
        return record

    async def show(self, tenant_id: str, conversation_id: str) -> wire.Record:
        """Return a conversation."""
        self.require(tenant_id, conversation_id)
        return await self._records.show(tenant_id, conversation_id)

    async def change(
        self, tenant_id: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> wire.Record:
        """Replace the metadata, and return the conversation."""
        self.require(tenant_id, conversation_id)
        return await self._records.change(tenant_id, conversation_id, metadata)

    async def remove(self, tenant_id: str, conversation_id: str) -> None:
        """Remove a conversation with its items."""
        self.require(tenant_id, conversation_id)
        await self._records.remove(tenant_id, conversation_id)

    async def append(
        self, tenant_id: str, conversation_id: str, items: Sequence[dict[str, Any]], param: str
    ) -> None:
        """Add all items, or raise BadRequestError if the conversation would be too large."""
        self.require(tenant_id, conversation_id)
        rows = _record_items(items, param)
        await self._records.append(tenant_id, conversation_id, rows, MESSAGES_MAX)

    async def page(
        self, tenant_id: str, conversation_id: str, limit: int, *, is_ascending: bool, after: str
    ) -> list[dict[str, Any]]:
        """Return at most `limit` items of a conversation."""
        self.require(tenant_id, conversation_id)
        wanted = wire.ListItemsRequest(
            tenant_id=tenant_id,
            id=conversation_id,
            after=after,
            limit=limit,
            is_ascending=is_ascending,
        )
        return [orjson.loads(it.content) async for it in self._records.items(wanted)]

    async def item(self, tenant_id: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Return an item."""
        self.require(tenant_id, conversation_id)
        wanted = wire.ListItemsRequest(
            tenant_id=tenant_id, id=conversation_id, item_ids=[item_id], limit=1
        )
        async for item in self._records.items(wanted):
            return orjson.loads(item.content)
        raise missing(item_id)

    async def remove_item(self, tenant_id: str, conversation_id: str, item_id: str) -> None:
        """Remove an item."""
        self.require(tenant_id, conversation_id)
        await self._records.remove_item(tenant_id, conversation_id, item_id)

    async def context(self, tenant_id: str, conversation_id: str, param: str) -> list[InputItem]:
        """Return all items, the oldest first, or raise BadRequestError if they are too large."""
        self.require(tenant_id, conversation_id, param)
        wanted = wire.ListItemsRequest(tenant_id=tenant_id, id=conversation_id, is_ascending=True)
        items, size = list[InputItem](), 0
        async for item in self._records.items(wanted):
            size += len(item.content)
            if size > _CONTEXT_BYTES_MAX:
                text = (
                    f"the conversation has more than {_CONTEXT_BYTES_MAX >> 20} MiB of items;"
                    " begin another"
                )
                raise bad_value(param, text)
            items.append(_ITEM.validate_json(item.content))
        return items


def new_items(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return items in the stored form, with new ids instead of the clients' ids."""
    stem = new_id("item").partition("_")[2]
    return stored_items([it.model_copy(update={"id": None}) for it in items], stem)


def _record_items(items: Sequence[dict[str, Any]], param: str) -> list[wire.RecordItem]:
    rows = [wire.RecordItem(id=item["id"], content=orjson.dumps(item)) for item in items]
    if sum(row.ByteSize() for row in rows) > _BYTES_MAX:
        raise bad_value(
            param, f"the items have more than {_BYTES_MAX >> 20} MiB; send fewer at once"
        )
    return rows
