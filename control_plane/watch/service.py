"""Watch over gRPC, which sends a snapshot or the changes since a version, and then later changes.

A watcher costs only a position in the shared history. A watcher that reads too slowly for the
history receives a new snapshot. A watcher that does not read at all is disconnected after ten
seconds, and reconnects.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

import grpc.aio
import structlog

from control_plane.database import DatabaseDownError
from control_plane.fields import is_digest, is_id
from control_plane.watch.feed import Feed, Snapshot
from control_plane.watch.history import joined
from sluice.addresses import is_address
from sluice.base_files import MISSING_BASES_MAX
from sluice.wire.control.v1 import control_pb2 as wire

log = structlog.get_logger(__name__)

_HEARTBEAT_S = 2.0
_WRITE_TIMEOUT_S = 10.0
# deadline in seconds for sending all parts of a snapshot, which stays in memory until then
_SNAPSHOT_TIMEOUT_S = 60.0
_SERVICE = "sluice.wire.control.v1.ControlService"

_ROLES: dict[int, str] = {
    wire.ROLE_GATEWAY: "gateway",
    wire.ROLE_ROUTER: "router",
    wire.ROLE_OPERATOR: "operator",
}

Context = grpc.aio.ServicerContext[wire.WatchRequest, bytes]


class WatchService:
    """Serves the gRPC service `ControlService`. Messages are serialized once for all watchers."""

    def __init__(
        self,
        feed: Feed,
        present: Callable[[str, str], AbstractContextManager[None]],
        leave: Callable[[str], None],
        count: Callable[[str, int], None],
        confirm: Callable[[str, int, int, frozenset[str]], Awaitable[None]],
        report: Callable[[wire.ReportDemandRequest], Awaitable[int]],
        accuse: Callable[[wire.AccuseRequest], Awaitable[None]],
    ) -> None:
        """Create the gRPC service.

        Args:
            feed: The state and changes that are served.
            present: Called with (router id, address). The router counts as present while the
                context is open.
            leave: Called with the id of a router that is shutting down.
            count: Called with (role, +1 or -1) to count watchers.
            confirm: Stores a gateway's confirmation. Its first arguments are the gateway's id and
                the version of its splits. The third is the arrival time of its oldest open request,
                in Unix milliseconds, or 0 without one. The last is the bases that the gateway
                cannot serve yet.
            report: Stores a router's report of demand and returns the milliseconds until the next
                report. Raises ValueError if the report is not valid.
            accuse: Stores a router's report of replicas that were ejected for wrong answers. Raises
                ValueError if the report is not valid.
        """
        self._feed = feed
        self._present = present
        self._leave = leave
        self._count = count
        self._confirm = confirm
        self._report = report
        self._accuse = accuse

    def handler(self) -> "grpc.GenericRpcHandler[wire.WatchRequest, bytes]":
        """Return the handler for `grpc.aio.Server.add_generic_rpc_handlers`."""
        method = grpc.unary_stream_rpc_method_handler(
            self.watch, request_deserializer=wire.WatchRequest.FromString, response_serializer=None
        )
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                "Watch": method,
                "Leave": grpc.unary_unary_rpc_method_handler(
                    self.leave,  # pyright: ignore[reportArgumentType]
                    request_deserializer=wire.LeaveRequest.FromString,
                    response_serializer=wire.LeaveResponse.SerializeToString,
                ),
                "Accuse": grpc.unary_unary_rpc_method_handler(
                    self.accuse,  # pyright: ignore[reportArgumentType]
                    request_deserializer=wire.AccuseRequest.FromString,
                    response_serializer=wire.AccuseResponse.SerializeToString,
                ),
                "Confirm": grpc.unary_unary_rpc_method_handler(
                    self.confirm,  # pyright: ignore[reportArgumentType]
                    request_deserializer=wire.ConfirmRequest.FromString,
                    response_serializer=wire.ConfirmResponse.SerializeToString,
                ),
                "ReportDemand": grpc.unary_unary_rpc_method_handler(
                    self.report_demand,  # pyright: ignore[reportArgumentType]
                    request_deserializer=wire.ReportDemandRequest.FromString,
                    response_serializer=wire.ReportDemandResponse.SerializeToString,
                ),
            },
        )

    async def leave(
        self,
        request: wire.LeaveRequest,
        context: "grpc.aio.ServicerContext[wire.LeaveRequest, wire.LeaveResponse]",
    ) -> wire.LeaveResponse:
        """Record that a router is shutting down, so that its cells have another owner at once."""
        if not is_id(request.instance_id):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a router needs an id")
        self._leave(request.instance_id)
        return wire.LeaveResponse()

    async def accuse(
        self,
        request: wire.AccuseRequest,
        context: "grpc.aio.ServicerContext[wire.AccuseRequest, wire.AccuseResponse]",
    ) -> wire.AccuseResponse:
        """Store a router's report of replicas that it ejected for wrong answers."""
        try:
            await self._accuse(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DatabaseDownError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
        return wire.AccuseResponse()

    async def confirm(
        self,
        request: wire.ConfirmRequest,
        context: "grpc.aio.ServicerContext[wire.ConfirmRequest, wire.ConfirmResponse]",
    ) -> wire.ConfirmResponse:
        """Store the version of the splits that a gateway follows, which rollouts wait for."""
        is_stored = max(request.version, request.oldest_open_unix_ms) < 1 << 63
        if not (is_id(request.gateway_id) and is_stored):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a gateway needs an id")
        missing = request.missing_bases
        if len(missing) > MISSING_BASES_MAX or not all(map(is_digest, missing)):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the list of missing bases is invalid"
            )
        oldest_open_ms = request.oldest_open_unix_ms
        try:
            await self._confirm(
                request.gateway_id, request.version, oldest_open_ms, frozenset(missing)
            )
        except DatabaseDownError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
        return wire.ConfirmResponse()

    async def report_demand(
        self,
        request: wire.ReportDemandRequest,
        context: "grpc.aio.ServicerContext[wire.ReportDemandRequest, wire.ReportDemandResponse]",
    ) -> wire.ReportDemandResponse:
        """Store the demand of a router's cells, for scaling."""
        is_ours = all(is_id(cell.cell_id) for cell in request.cells)
        if not (is_id(request.router_id) and is_ours):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "routers and cells need ids")
        interval_ms = 0
        try:
            interval_ms = await self._report(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DatabaseDownError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
        return wire.ReportDemandResponse(interval_ms=interval_ms)

    async def watch(self, request: wire.WatchRequest, context: Context) -> None:
        """Serve one watcher until it disconnects, or stops reading."""
        if not self._feed.is_loaded:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "no state yet: the database has not been read"
            )
        role = _ROLES.get(request.role, "other")
        presence: AbstractContextManager[None] = nullcontext()
        if request.role == wire.ROLE_ROUTER and request.address:
            if not (is_id(request.instance_id) and is_address(request.address)):
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, "a router needs an id and a host:port"
                )
            presence = self._present(request.instance_id, request.address)
        self._count(role, 1)
        try:
            with presence:
                await self._serve(request, context)
        except TimeoutError:
            log.warning("watcher_cut", role=role, instance=request.instance_id)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the watcher does not read")
        finally:
            self._count(role, -1)

    async def _serve(self, request: wire.WatchRequest, context: Context) -> None:
        version = request.known_version
        # Count the router as present before a large snapshot is sent. A heartbeat with the version
        # confirms that the watcher's state is the newest.
        is_newest = self._feed.history.since(version) == []
        await _write(context, self._heartbeat(version if is_newest else 0))
        while True:
            changed = self._feed.changed()
            newer = self._feed.history.since(version)
            if newer is None:
                snapshot = await self._feed.snapshot()
                await _write_snapshot(context, snapshot, in_parts=request.takes_parts)
                version = snapshot.version
                continue
            for delta in joined(newer):
                await _write(context, delta.payload)
                version = delta.version
            if newer:
                continue
            if not is_newest:
                is_newest = True
                await _write(context, self._heartbeat(version))
                continue
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await changed.wait()
            except TimeoutError:
                await _write(context, self._heartbeat(version))

    @staticmethod
    def _heartbeat(version: int) -> bytes:
        return wire.WatchResponse(version=version, is_heartbeat=True).SerializeToString()


async def _write_snapshot(context: Context, snapshot: Snapshot, *, in_parts: bool) -> None:
    parts = snapshot.parts if in_parts else (b"".join(snapshot.parts),)
    async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
        for part in parts:
            await _write(context, part)


async def _write(context: Context, payload: bytes) -> None:
    async with asyncio.timeout(_WRITE_TIMEOUT_S):
        await context.write(payload)
