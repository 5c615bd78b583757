"""Compaction items: sealed with a key of their tenant, so that a client can only keep them."""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.bodies.compaction import Compacted
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import BODY_BYTES_MAX
from gateway.bodies.response_items import CompactionItem, InputItem, read_items, stored_items
from sluice.sealing import Sealer, SealError
from sluice.shared_secret import SharedSecret

_SEALED_MAX = BODY_BYTES_MAX // 2


class CompactionSeals:
    """Seals and opens compaction items of all tenants."""

    def __init__(self, secret: SharedSecret) -> None:
        """Prepare; keys are derived from the installation's secret, one for each tenant."""
        self._secret = secret

    def sealed(
        self, tenant_id: str, item_id: str, summary: str, kept: Sequence[InputItem]
    ) -> CompactionItem:
        """Return an item; BadRequestError: what is kept is too large to be sent back."""
        content = {"summary": summary, "kept": stored_items(kept, item_id)}
        sealed = self._sealer(tenant_id).seal(orjson.dumps(content).decode(), tenant_id)
        if len(sealed) > _SEALED_MAX:
            text = "its last turn is too large to stand behind a summary; send less of it"
            raise bad_value("input", text)
        return CompactionItem(type="compaction", id=item_id, encrypted_content=sealed)

    def opened(self, tenant_id: str, item: CompactionItem, param: str) -> Compacted:
        """Return the content of an item, which `param` names; BadRequestError: not of ours."""
        try:
            text = self._sealer(tenant_id).opened(item.encrypted_content, tenant_id)
        except SealError:
            text = "it was not made here for this tenant, or its secret is over; send the items"
            raise bad_value(param, text) from None
        content: dict[str, Any] = orjson.loads(text)
        return Compacted(content["summary"], read_items(content["kept"]))

    def _sealer(self, tenant_id: str) -> Sealer:
        return Sealer(self._secret, f"compaction of {tenant_id}")
