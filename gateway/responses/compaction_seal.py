"""Encrypts compaction items, so that a client can return an item but not read or alter it."""

import base64
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter

from gateway.bodies.chat_compaction import CompactedChat
from gateway.bodies.compaction import Compacted
from gateway.bodies.messages import CompactedHistory, Message
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import BODY_BYTES_MAX
from gateway.bodies.response_items import CompactionItem, InputItem, read_items, stored_items
from gateway.content.seals import ContentGoneError, ContentSeals
from sluice.sealing import Sealer, SealError
from sluice.shared_secret import SharedSecret

_TENANTS_OWN = "2."
# Purposes of the keys. An item of one purpose cannot be opened as an item of the other purpose.
_ITEMS, _CHATS = "compaction", "chat compaction"
_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])
_SEALED_MAX = BODY_BYTES_MAX // 2


class CompactionSeals:
    """Encrypts and decrypts the compaction items of all tenants."""

    def __init__(self, secret: SharedSecret, seals: ContentSeals) -> None:
        """The key of a tenant without its own key is derived from the installation's secret."""
        self._secret, self._seals = secret, seals

    def sealed(
        self, tenant_id: str, item_id: str, summary: str, kept: Sequence[InputItem]
    ) -> CompactionItem:
        """Return a compaction item, or raise BadRequestError if it is too large to send back."""
        content = {"summary": summary, "kept": stored_items(kept, item_id)}
        sealed = self._sealed(_ITEMS, tenant_id, content, "input")
        return CompactionItem(type="compaction", id=item_id, encrypted_content=sealed)

    def opened(self, tenant_id: str, item: CompactionItem, param: str) -> Compacted:
        """Return the content of an item. The error of an invalid item names the field `param`.

        Raises BadRequestError if the item is not valid.
        """
        content = self._opened(_ITEMS, tenant_id, item.encrypted_content, param)
        return Compacted(content["summary"], read_items(content["kept"]))

    def sealed_chat(
        self, tenant_id: str, item_id: str, summary: str, kept: Sequence[Message]
    ) -> CompactedHistory:
        """Return a chat's compaction item, or raise BadRequestError if it is too large."""
        told = [it.model_dump(exclude_none=True) for it in kept]
        sealed = self._sealed(_CHATS, tenant_id, {"summary": summary, "kept": told}, "messages")
        return CompactedHistory(type="compaction", id=item_id, encrypted_content=sealed)

    def opened_chat(self, tenant_id: str, item: CompactedHistory, param: str) -> CompactedChat:
        """Return the content of a chat's compaction item, with the errors of `opened`."""
        content = self._opened(_CHATS, tenant_id, item.encrypted_content, param)
        return CompactedChat(content["summary"], _MESSAGES.validate_python(content["kept"]))

    def _sealed(self, place: str, tenant_id: str, content: dict[str, Any], param: str) -> str:
        text = orjson.dumps(content)
        if self._seals.encrypts(tenant_id):
            data = self._seals.sealed(tenant_id, place, text)
            sealed = _TENANTS_OWN + base64.urlsafe_b64encode(data).decode()
        else:
            sealed = self._sealer(place, tenant_id).seal(text.decode(), tenant_id)
        if len(sealed) > _SEALED_MAX:
            told = "its last turn is too large to follow a summary; send less of it"
            raise bad_value(param, told)
        return sealed

    def _opened(self, place: str, tenant_id: str, sealed: str, param: str) -> dict[str, Any]:
        try:
            if sealed.startswith(_TENANTS_OWN):
                data = base64.urlsafe_b64decode(sealed.removeprefix(_TENANTS_OWN).encode())
                return orjson.loads(self._seals.opened_sealed(tenant_id, place, data))
            return orjson.loads(self._sealer(place, tenant_id).opened(sealed, tenant_id))
        except (SealError, ContentGoneError, ValueError):
            text = "it is from another tenant or server, or its key has expired; send the items"
            raise bad_value(param, text) from None

    def _sealer(self, place: str, tenant_id: str) -> Sealer:
        return Sealer(self._secret, f"{place} of {tenant_id}")
