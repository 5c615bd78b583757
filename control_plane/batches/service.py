"""Batches over gRPC, and the loop that begins and ends them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.batches import repository
from control_plane.batches.repository import BatchEndedError
from control_plane.database import Database, DatabaseDownError
from control_plane.records.repository import NoRecordError
from sluice.wire.state.v1 import state_pb2 as wire
from sluice.wire.state.v1.state_pb2_grpc import BatchServiceServicer

_DEADLINE_S = 3.0
_TAKEN_MAX, _TAKEN_BYTES_MAX = 64, 2 << 20

_Result = TypeVar("_Result")
_Context = grpc.aio.ServicerContext[Any, Any]


class BatchService(BatchServiceServicer):
    """Serves the gRPC service `BatchService`."""

    def __init__(self, database: Database) -> None:
        """Create the service, which reads and writes batches in `database`."""
        self._database = database

    async def Begin(self, request: wire.Batch, context: _Context) -> wire.Batch:  # noqa: N802
        """Store a batch."""
        return await self._run(lambda connection: repository.begin(connection, request), context)

    async def Show(  # noqa: N802 - gRPC's name
        self, request: wire.RecordRequest, context: _Context
    ) -> wire.Batch:
        """Return a batch."""
        return await self._run(
            lambda connection: repository.show(connection, request.tenant_id, request.id), context
        )

    async def List(  # noqa: N802 - gRPC's name
        self, request: wire.ListRecordsRequest, context: _Context
    ) -> AsyncIterator[wire.Batch]:
        """Return a page of batches."""
        for batch in await self._run(
            lambda connection: repository.listed(connection, request), context
        ):
            yield batch

    async def Cancel(  # noqa: N802 - gRPC's name
        self, request: wire.RecordRequest, context: _Context
    ) -> wire.Batch:
        """Begin to cancel a batch."""
        return await self._run(
            lambda connection: repository.cancel(connection, request.tenant_id, request.id),
            context,
        )

    async def Sync(  # noqa: N802 - gRPC's name
        self, request: wire.SyncLinesRequest, context: _Context
    ) -> wire.SyncLinesResponse:
        """Store the results of lines, and lease further lines to the gateway."""
        return await self._run(lambda connection: _sync(connection, request), context)

    async def _run(
        self, work: Callable[[AsyncConnection], Awaitable[_Result]], context: _Context
    ) -> _Result:
        try:
            return await self._database.run(work, deadline_s=_DEADLINE_S)
        except NoRecordError:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no batch with this id")
            raise
        except BatchEndedError:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it has ended")
            raise
        except (DatabaseDownError, DBAPIError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the database cannot be reached")
            raise


async def _sync(
    connection: AsyncConnection, request: wire.SyncLinesRequest
) -> wire.SyncLinesResponse:
    gateway_id = request.gateway_id
    await repository.record(connection, request.results)
    if request.given_back:
        await repository.give_back(connection, gateway_id, request.given_back)
    response = wire.SyncLinesResponse()
    if request.under_way:
        response.lost.extend(await repository.extend(connection, gateway_id, request.under_way))
    if request.wanted > 0:
        wanted = min(request.wanted, _TAKEN_MAX)
        lines = await repository.take(connection, gateway_id, wanted)
        response.lines.extend(lines)
    return response
