"""Stores records of tenants for gateways, over gRPC."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database, DatabaseDownError
from control_plane.records import repository
from control_plane.records.repository import NoRecordError, TooManyItemsError
from sluice.wire.state.v1 import state_pb2 as wire
from sluice.wire.state.v1.state_pb2_grpc import RecordServiceServicer

_DEADLINE_S = 3.0
_AT_ONCE = 64  # largest number of records or items per transaction

_Result = TypeVar("_Result")
_Context = grpc.aio.ServicerContext[Any, Any]


class RecordService(RecordServiceServicer):
    """Serves the gRPC service `RecordService`."""

    def __init__(self, database: Database) -> None:
        """Create the service, which reads and writes records in `database`."""
        self._database = database

    async def Create(  # noqa: N802 - gRPC's name
        self, request: wire.CreateRecordRequest, context: _Context
    ) -> wire.Record:
        """Store a record."""
        await self._run(
            lambda connection: repository.create(connection, request.record, request.items),
            context,
        )
        return request.record

    async def Show(  # noqa: N802 - gRPC's name
        self, request: wire.RecordRequest, context: _Context
    ) -> wire.Record:
        """Return a record."""
        return await self._run(
            lambda connection: repository.show(connection, request.tenant_id, request.id), context
        )

    async def List(  # noqa: N802 - gRPC's name
        self, request: wire.ListRecordsRequest, context: _Context
    ) -> AsyncIterator[wire.Record]:
        """Send a page of records."""
        found = await self._run(lambda connection: repository.listed(connection, request), context)
        for record in found:
            yield record

    async def Change(  # noqa: N802 - gRPC's name
        self, request: wire.ChangeRecordRequest, context: _Context
    ) -> wire.Record:
        """Replace the content of a record."""
        return await self._run(
            lambda connection: repository.change(
                connection, request.tenant_id, request.id, request.metadata, request.content
            ),
            context,
        )

    async def Remove(  # noqa: N802 - gRPC's name
        self, request: wire.RecordRequest, context: _Context
    ) -> wire.RemoveRecordResponse:
        """Delete a record."""
        await self._run(
            lambda connection: repository.remove(connection, request.tenant_id, request.id),
            context,
        )
        return wire.RemoveRecordResponse()

    async def Append(  # noqa: N802 - gRPC's name
        self, request: wire.AppendItemsRequest, context: _Context
    ) -> wire.AppendItemsResponse:
        """Append items to a record."""
        await self._run(lambda connection: repository.append(connection, request), context)
        return wire.AppendItemsResponse()

    async def ListItems(  # noqa: N802 - gRPC's name
        self, request: wire.ListItemsRequest, context: _Context
    ) -> AsyncIterator[wire.RecordItem]:
        """Send the items of a record, with one transaction per page."""
        page = wire.ListItemsRequest()
        page.CopyFrom(request)
        left = request.limit
        while True:
            limit = min(left, _AT_ONCE) if request.limit else _AT_ONCE
            found = await self._run(
                lambda connection, limit=limit: repository.items(connection, page, limit), context
            )
            for item in found:
                yield item
            left -= len(found)
            if len(found) < limit or (request.limit and not left):
                return
            page.after = found[-1].id

    async def RemoveItem(  # noqa: N802 - gRPC's name
        self, request: wire.RemoveItemRequest, context: _Context
    ) -> wire.RemoveRecordResponse:
        """Delete an item of a record."""
        await self._run(
            lambda connection: repository.remove_item(
                connection, request.tenant_id, request.id, request.item_id
            ),
            context,
        )
        return wire.RemoveRecordResponse()

    async def _run(
        self, work: Callable[[AsyncConnection], Awaitable[_Result]], context: _Context
    ) -> _Result:
        try:
            return await self._database.run(work, deadline_s=_DEADLINE_S)
        except NoRecordError:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, "there is no record or item with this id"
            )
            raise
        except TooManyItemsError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "it has too many items")
            raise
        except (DatabaseDownError, DBAPIError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the database cannot be reached")
            raise
