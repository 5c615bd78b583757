"""Stores files of tenants as records whose items are the parts of the file."""

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson

from gateway.records.client import RecordClient
from sluice.files import KIND, PART_BYTES, PREFIX, file_content, part_id
from sluice.wire.state.v1 import state_pb2 as wire

FILE_BYTES_MAX = 100 << 20


class FileStore:
    """The files of one worker's tenants.

    Each method raises NOT_FOUND for an unknown id. Its other errors are those of `RecordClient`.
    """

    def __init__(self, records: RecordClient) -> None:
        """`records` stores each file as one record."""
        self._records = records

    def require(self, tenant_id: str, file_id: str, param: str | None = None) -> None:
        """Raise NOT_FOUND unless the id was created for this tenant."""
        self._records.require(file_id, PREFIX, tenant_id, param)

    async def write(
        self, tenant_id: str, filename: str, purpose: str, content: AsyncIterator[bytes]
    ) -> dict[str, Any]:
        """Store a new file, and return the API's object for it.

        If `content` raises an error, the file is removed again.
        """
        record = wire.Record(
            id=self._records.new_id(PREFIX, tenant_id),
            tenant_id=tenant_id,
            kind=KIND,
            created_at_unix_ms=time.time_ns() // 1_000_000,
            # "error" is the status until all parts are stored.
            content=file_content(filename, purpose, 0, "error"),
        )
        await self._records.create(record)
        try:
            size = await self._write_parts(record, content)
        except BaseException:
            await self._records.remove(tenant_id, record.id)
            raise
        whole = file_content(filename, purpose, size)
        return file_object(await self._records.change(tenant_id, record.id, {}, whole))

    async def _write_parts(self, record: wire.Record, content: AsyncIterator[bytes]) -> int:
        part, size, number = bytearray(), 0, 0
        async for some in content:
            part += some
            size += len(some)
            while len(part) >= PART_BYTES:
                await self._write_part(record, number, bytes(part[:PART_BYTES]))
                del part[:PART_BYTES]
                number += 1
        if part:
            await self._write_part(record, number, bytes(part))
        return size

    async def _write_part(self, record: wire.Record, number: int, content: bytes) -> None:
        item = wire.RecordItem(id=part_id(number), content=content)
        await self._records.append(record.tenant_id, record.id, [item])

    async def show(self, tenant_id: str, file_id: str, param: str | None = None) -> dict[str, Any]:
        """Return the API's object for a file."""
        self.require(tenant_id, file_id, param)
        return file_object(await self._records.show(tenant_id, file_id, param))

    async def listed(
        self, tenant_id: str, limit: int, *, is_ascending: bool, after: str
    ) -> list[dict[str, Any]]:
        """Return the API's objects for at most `limit` files."""
        if after:
            self.require(tenant_id, after, "after")
        wanted = wire.ListRecordsRequest(
            tenant_id=tenant_id, kind=KIND, after=after, limit=limit, is_ascending=is_ascending
        )
        return [file_object(record) for record in await self._records.listed(wanted)]

    async def content(self, tenant_id: str, file_id: str) -> AsyncIterator[bytes]:
        """Yield the parts of a file."""
        self.require(tenant_id, file_id)
        wanted = wire.ListItemsRequest(tenant_id=tenant_id, id=file_id, is_ascending=True)
        async for item in self._records.items(wanted):
            yield item.content

    async def remove(self, tenant_id: str, file_id: str) -> None:
        """Remove a file."""
        self.require(tenant_id, file_id)
        await self._records.remove(tenant_id, file_id)


def file_object(record: wire.Record) -> dict[str, Any]:
    """Return the API's object for a file's record."""
    told: dict[str, Any] = {"id": record.id, "object": "file"}
    return told | {"created_at": record.created_at_unix_ms // 1000} | orjson.loads(record.content)
