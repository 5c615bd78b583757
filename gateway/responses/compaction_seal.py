"""Compaction items: sealed with a key of their tenant, so that a client can only keep them."""

import base64
from collections.abc import Sequence
from typing import Any

import orjson

from gateway.bodies.compaction import Compacted
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import BODY_BYTES_MAX
from gateway.bodies.response_items import CompactionItem, InputItem, read_items, stored_items
from gateway.content.seals import ContentGoneError, ContentSeals
from sluice.sealing import Sealer, SealError
from sluice.shared_secret import SharedSecret

_TENANTS_OWN, _PLACE = "2.", "compaction"
_SEALED_MAX = BODY_BYTES_MAX // 2


class CompactionSeals:
    """Seals and opens compaction items of all tenants."""

    def __init__(self, secret: SharedSecret, seals: ContentSeals) -> None:
        """Prepare.

        A tenant without a key of its own has one that is derived from the installation's secret.
        """
        self._secret, self._seals = secret, seals

    def sealed(
        self, tenant_id: str, item_id: str, summary: str, kept: Sequence[InputItem]
    ) -> CompactionItem:
        """Return an item; BadRequestError: what is kept is too large to be sent back."""
        content = {"summary": summary, "kept": stored_items(kept, item_id)}
        sealed = self._sealed(tenant_id, orjson.dumps(content))
        if len(sealed) > _SEALED_MAX:
            text = "its last turn is too large to follow a summary; send less of it"
            raise bad_value("input", text)
        return CompactionItem(type="compaction", id=item_id, encrypted_content=sealed)

    def opened(self, tenant_id: str, item: CompactionItem, param: str) -> Compacted:
        """Return the content of an item, which `param` names; BadRequestError: not of ours."""
        try:
            text = self._opened(tenant_id, item.encrypted_content)
        except (SealError, ContentGoneError, ValueError):
            text = "it is from another tenant or server, or its key has expired; send the items"
            raise bad_value(param, text) from None
        content: dict[str, Any] = orjson.loads(text)
        return Compacted(content["summary"], read_items(content["kept"]))

    def _sealed(self, tenant_id: str, content: bytes) -> str:
        if not self._seals.encrypts(tenant_id):
            return self._sealer(tenant_id).seal(content.decode(), tenant_id)
        sealed = self._seals.sealed(tenant_id, _PLACE, content)
        return _TENANTS_OWN + base64.urlsafe_b64encode(sealed).decode()

    def _opened(self, tenant_id: str, sealed: str) -> str | bytes:
        if not sealed.startswith(_TENANTS_OWN):
            return self._sealer(tenant_id).opened(sealed, tenant_id)
        data = base64.urlsafe_b64decode(sealed.removeprefix(_TENANTS_OWN).encode())
        return self._seals.opened_sealed(tenant_id, _PLACE, data)

    def _sealer(self, tenant_id: str) -> Sealer:
        return Sealer(self._secret, f"compaction of {tenant_id}")
