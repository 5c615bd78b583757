"""A client of the control plane's store of tenant records (files, batches, conversations).

Responses have a separate client, `gateway.responses.durable`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence

import grpc.aio

from sluice.channels import RenewedChannel
from sluice.errors import ErrorCode, PlatformError, RejectedError
from sluice.identity import CertificateRole
from sluice.response_ids import is_owned, new_owned_id
from sluice.shared_secret import SharedSecret
from sluice.wire.state.v1 import state_pb2 as wire
from sluice.wire.state.v1.state_pb2_grpc import RecordServiceStub

_DEADLINE_S, _LIST_S = 4.0, 30.0
_SHOWN_CHARACTERS_MAX = 100
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class RecordClient:
    """The record client of one worker.

    All methods raise RejectedError UNAVAILABLE if PostgreSQL cannot be reached.
    """

    def __init__(self, control_address: str, secret: SharedSecret) -> None:
        """The `secret` verifies that an id belongs to a tenant."""
        self._link = RenewedChannel(
            control_address, CertificateRole.CONTROL_PLANE, options=_CHANNEL_OPTIONS
        )
        self._secret = secret

    async def close(self) -> None:
        """Close the connection."""
        await self._link.aclose()

    def new_id(self, prefix: str, tenant_id: str) -> str:
        """Return an id for a new record of a tenant."""
        return new_owned_id(prefix, tenant_id, self._secret)

    def require(self, record_id: str, prefix: str, tenant_id: str, param: str | None) -> None:
        """Raise PlatformError NOT_FOUND unless the id was created for this tenant."""
        if not is_owned(record_id, prefix, tenant_id, self._secret):
            raise missing(record_id, param)

    async def create(self, record: wire.Record, items: Sequence[wire.RecordItem] = ()) -> None:
        """Write a record with its first items."""
        await self._call("Create", wire.CreateRecordRequest(record=record, items=items), record.id)

    async def show(self, tenant_id: str, record_id: str, param: str | None = None) -> wire.Record:
        """Return a record, or raise PlatformError NOT_FOUND for an unknown id."""
        request = wire.RecordRequest(tenant_id=tenant_id, id=record_id)
        return await self._call("Show", request, record_id, param)

    async def listed(self, wanted: wire.ListRecordsRequest) -> list[wire.Record]:
        """Return a page of records, or raise PlatformError NOT_FOUND for an unknown `after`."""
        call = RecordServiceStub(await self._link.current()).List(wanted, timeout=_LIST_S)
        try:
            return [record async for record in call]
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, wanted.after, "after") from None

    async def change(
        self, tenant_id: str, record_id: str, metadata: Mapping[str, str], content: bytes = b""
    ) -> wire.Record:
        """Replace a record's metadata, and its content if `content` is not empty.

        Returns:
            The changed record.

        Raises:
            PlatformError: NOT_FOUND for an unknown id.
        """
        request = wire.ChangeRecordRequest(
            tenant_id=tenant_id, id=record_id, metadata=metadata, content=content
        )
        return await self._call("Change", request, record_id)

    async def remove(self, tenant_id: str, record_id: str) -> None:
        """Remove a record with its items, or raise PlatformError NOT_FOUND for an unknown id."""
        await self._call("Remove", wire.RecordRequest(tenant_id=tenant_id, id=record_id), record_id)

    async def append(
        self,
        tenant_id: str,
        record_id: str,
        items: Sequence[wire.RecordItem],
        items_max: int = 0,
    ) -> None:
        """Add all items, or none if one is refused.

        Raises PlatformError NOT_FOUND for an unknown record. The error is INVALID_REQUEST if the
        record would have more than `items_max` items.
        """
        request = wire.AppendItemsRequest(
            tenant_id=tenant_id, id=record_id, items=items, items_max=items_max
        )
        await self._call("Append", request, record_id)

    async def items(self, wanted: wire.ListItemsRequest) -> AsyncIterator[wire.RecordItem]:
        """Yield items of a record, or raise PlatformError NOT_FOUND for an unknown record."""
        call = RecordServiceStub(await self._link.current()).ListItems(wanted, timeout=_LIST_S)
        try:
            async for item in call:
                yield item
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, wanted.after or wanted.id, None) from None

    async def remove_item(self, tenant_id: str, record_id: str, item_id: str) -> None:
        """Remove an item, or raise PlatformError NOT_FOUND for an unknown item."""
        request = wire.RemoveItemRequest(tenant_id=tenant_id, id=record_id, item_id=item_id)
        await self._call("RemoveItem", request, item_id)

    async def _call(
        self, name: str, request: object, shown_id: str, param: str | None = None
    ) -> wire.Record:
        stub = RecordServiceStub(await self._link.current())
        try:
            return await getattr(stub, name)(request, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, shown_id, param) from None


def missing(record_id: str, param: str | None = None) -> PlatformError:
    """Return the error for an unknown id or an id of another tenant."""
    shown = record_id[:_SHOWN_CHARACTERS_MAX]
    text = f"No object has the id '{shown}': it never existed, was deleted, or has expired."
    return PlatformError(ErrorCode.NOT_FOUND, text, param=param)


def _error_of(error: grpc.aio.AioRpcError, shown_id: str, param: str | None) -> PlatformError:
    code = error.code()
    if code is grpc.StatusCode.NOT_FOUND:
        return missing(shown_id, param)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        text = (
            f"'{shown_id[:_SHOWN_CHARACTERS_MAX]}' has reached its limit of items; begin another."
        )
        return PlatformError(ErrorCode.INVALID_REQUEST, text, param=param)
    text = "The store cannot be reached now; try again shortly."
    return RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=2.0)
