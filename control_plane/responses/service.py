"""Stores responses for gateways, over gRPC."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database, DatabaseDownError
from control_plane.responses import repository
from sluice.response_ids import is_response_id
from sluice.wire.state.v1 import state_pb2 as wire
from sluice.wire.state.v1.state_pb2_grpc import StateServiceServicer

IDS_MAX = 1024  # largest number of ids per call
_DEADLINE_S = 3.0
_READ_AT_ONCE = 64

_Result = TypeVar("_Result")
_Context = grpc.aio.ServicerContext[Any, Any]


class StateService(StateServiceServicer):
    """Serves the gRPC service `StateService`."""

    def __init__(self, database: Database) -> None:
        """Create the service, which reads and writes responses in `database`."""
        self._database = database

    async def Keep(  # noqa: N802 - gRPC's name
        self, request: wire.KeepRequest, context: _Context
    ) -> wire.KeepResponse:
        """Store the responses that a gateway sends, because clients may continue them later."""
        stored = request.responses
        if len(stored) > IDS_MAX or not all(is_response_id(it.id) for it in stored):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the message holds no valid responses"
            )

        async def work(connection: AsyncConnection) -> None:
            if stored:
                await repository.keep(connection, stored)
            else:
                # creates no partition, and only checks whether the tables exist
                await repository.make_partitions(connection, ())

        await self._run(work, context)
        return wire.KeepResponse()

    async def Read(  # noqa: N802 - gRPC's name
        self, request: wire.ReadRequest, context: _Context
    ) -> AsyncIterator[wire.StoredResponse]:
        """Send a tenant's stored responses with the requested ids."""
        ids = list(request.ids)
        if len(ids) > IDS_MAX or not all(map(is_response_id, ids)):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the message holds no valid ids of responses"
            )
        for start in range(0, len(ids), _READ_AT_ONCE):
            some = ids[start : start + _READ_AT_ONCE]
            found = await self._run(
                lambda connection, some=some: repository.read(connection, request.tenant_id, some),
                context,
            )
            for response_id in some:
                if (stored := found.get(response_id)) is not None:
                    yield stored

    async def Delete(  # noqa: N802 - gRPC's name
        self, request: wire.DeleteRequest, context: _Context
    ) -> wire.DeleteResponse:
        """Delete one response."""
        if not is_response_id(request.id):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the id of the response is invalid"
            )
        existed = await self._run(
            lambda connection: repository.forget(connection, request.tenant_id, request.id),
            context,
        )
        return wire.DeleteResponse(existed=existed)

    async def _run(
        self, work: Callable[[AsyncConnection], Awaitable[_Result]], context: _Context
    ) -> _Result:
        try:
            return await self._database.run(work, deadline_s=_DEADLINE_S)
        except (DatabaseDownError, DBAPIError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the database cannot be reached")
            raise
