"""Records whose contents are encrypted with the keys of their tenants."""

from collections.abc import AsyncIterator, Mapping, Sequence

from gateway.content.seals import ContentGoneError, ContentSeals
from gateway.records.client import RecordClient, missing
from sluice.wire.state.v1 import state_pb2 as wire


class SealedRecords:
    """A `RecordClient` whose records are encrypted.

    The methods raise the errors of `RecordClient`. A record whose key was deleted is NOT_FOUND.
    """

    def __init__(self, records: RecordClient, seals: ContentSeals) -> None:
        """`seals` encrypts and decrypts with the keys of the tenants."""
        self._records, self._seals = records, seals
        self.new_id, self.require = records.new_id, records.require
        self.remove, self.remove_item = records.remove, records.remove_item

    async def create(self, record: wire.Record, items: Sequence[wire.RecordItem] = ()) -> None:
        """Write a record with its first items."""
        sealed = wire.Record()
        sealed.CopyFrom(record)
        sealed.content = self._seals.sealed(record.tenant_id, record.id, record.content)
        await self._records.create(sealed, self._items(record.tenant_id, record.id, items))

    async def show(self, tenant_id: str, record_id: str, param: str | None = None) -> wire.Record:
        """Return a record."""
        record = self._opened(tenant_id, await self._records.show(tenant_id, record_id, param))
        if record is None:
            raise missing(record_id, param)
        return record

    async def listed(self, wanted: wire.ListRecordsRequest) -> list[wire.Record]:
        """Return records, except records whose keys were deleted."""
        found = await self._records.listed(wanted)
        opened = [self._opened(wanted.tenant_id, it) for it in found]
        return [it for it in opened if it is not None]

    async def change(
        self, tenant_id: str, record_id: str, metadata: Mapping[str, str]
    ) -> wire.Record:
        """Replace the metadata of a record, and return the record."""
        changed = await self._records.change(tenant_id, record_id, metadata)
        record = self._opened(tenant_id, changed)
        if record is None:
            raise missing(record_id)
        return record

    async def append(
        self, tenant_id: str, record_id: str, items: Sequence[wire.RecordItem], items_max: int = 0
    ) -> None:
        """Add all items, or none if one is refused."""
        sealed = self._items(tenant_id, record_id, items)
        await self._records.append(tenant_id, record_id, sealed, items_max)

    async def items(self, wanted: wire.ListItemsRequest) -> AsyncIterator[wire.RecordItem]:
        """Yield items of a record."""
        tenant_id, record_id = wanted.tenant_id, wanted.id
        async for item in self._records.items(wanted):
            try:
                place = _item_place(record_id, item.id)
                item.content = self._seals.opened(tenant_id, place, item.content)
            except ContentGoneError:
                raise missing(record_id) from None
            yield item

    def _items(
        self, tenant_id: str, record_id: str, items: Sequence[wire.RecordItem]
    ) -> Sequence[wire.RecordItem]:
        if not self._seals.encrypts(tenant_id):
            return items
        seal = self._seals.sealed
        return [
            wire.RecordItem(
                id=it.id, content=seal(tenant_id, _item_place(record_id, it.id), it.content)
            )
            for it in items
        ]

    def _opened(self, tenant_id: str, record: wire.Record) -> wire.Record | None:
        try:
            record.content = self._seals.opened(tenant_id, record.id, record.content)
        except ContentGoneError:
            return None
        return record


def _item_place(record_id: str, item_id: str) -> str:
    return f"{record_id}/{item_id}"
