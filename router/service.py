"""The gRPC service of the router, with one bidirectional stream per gateway worker."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import structlog

from router.hub import Hub
from router.outgoing import GatewayLink
from router.pool_reports import PoolReports
from sluice.wire.router.v1 import router_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger(__name__)

_SERVICE = "sluice.wire.router.v1.RouterService"
_HELLO_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 10.0
_LOOK_S = 1.0
_TOO_SLOW = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the caller reads too slowly")
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A prompt of 240 KB arrives in one flight. The default window of 64 KiB needs round trips.
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.so_reuseport", 0),  # a second router on the same port must fail to start
)


class RouterService:
    """Serves gateways and other routers, with responses that their producers have serialized."""

    def __init__(self, hub: Hub, router_id: str, reports: PoolReports) -> None:
        self._hub = hub
        self._reports = reports
        self._router_id = router_id
        self._ended = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service's methods."""
        # Responses are already bytes, so the serializer is None.
        handler = grpc.stream_stream_rpc_method_handler(
            self.connect,  # pyright: ignore[reportArgumentType]
            request_deserializer=wire.ConnectRequest.FromString,
            response_serializer=cast("Callable[[bytes], bytes]", None),
        )
        explain = grpc.unary_unary_rpc_method_handler(
            self.explain,  # pyright: ignore[reportArgumentType]
            request_deserializer=wire.ExplainRequest.FromString,
            response_serializer=wire.Explanation.SerializeToString,
        )
        ping = grpc.unary_unary_rpc_method_handler(
            self.ping,  # pyright: ignore[reportArgumentType]
            request_deserializer=wire.PingRequest.FromString,
            response_serializer=wire.PingResponse.SerializeToString,
        )
        follow = grpc.unary_stream_rpc_method_handler(
            self.follow_service,  # pyright: ignore[reportArgumentType]
            request_deserializer=wire.FollowServiceRequest.FromString,
            response_serializer=None,
        )
        live = grpc.unary_stream_rpc_method_handler(
            self.live,  # pyright: ignore[reportArgumentType]
            request_deserializer=wire.LiveRequest.FromString,
            response_serializer=None,
        )
        methods = {
            "Connect": handler,
            "Explain": explain,
            "Ping": ping,
            "Live": live,
            "FollowService": follow,
        }
        handlers = grpc.method_handlers_generic_handler(_SERVICE, methods)
        server.add_generic_rpc_handlers((handlers,))

    def end(self) -> None:
        """End every stream, after its unsent messages have been written."""
        self._hub.is_ending = True
        self._reports.stop()
        self._ended.set()

    async def explain(
        self,
        request: wire.ExplainRequest,
        context: "grpc.aio.ServicerContext[wire.ExplainRequest, wire.Explanation]",
    ) -> wire.Explanation:
        """Return the explanation of a live or hypothetical request."""
        try:
            explanation = self._hub.explain(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        explanation.router_id = self._router_id
        return explanation

    async def ping(
        self,
        _request: wire.PingRequest,
        _context: "grpc.aio.ServicerContext[wire.PingRequest, wire.PingResponse]",
    ) -> wire.PingResponse:
        """Return an empty response, which proves that the event loop runs."""
        return wire.PingResponse()

    async def live(
        self,
        _request: wire.LiveRequest,
        context: "grpc.aio.ServicerContext[wire.LiveRequest, bytes]",
    ) -> None:
        """Stream an empty message with each sign of life that gateways get, until the end.

        A message costs a third of an answered ping, and leaves while the event loop is awake.
        """
        try:
            while not self._ended.is_set():
                await self._hub.next_sign_of_life()
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await context.write(b"")
        except TimeoutError:
            await context.abort(*_TOO_SLOW)

    async def follow_service(
        self,
        request: wire.FollowServiceRequest,
        context: "grpc.aio.ServicerContext[wire.FollowServiceRequest, bytes]",
    ) -> None:
        """Stream reports of tenants' tokens to another router until that router ends or lags."""
        reader = self._reports.open(request.pool_id)
        try:
            while (message := await reader.next()) is not None:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await context.write(message)
        except TimeoutError:
            await context.abort(*_TOO_SLOW)
        finally:
            self._reports.close(request.pool_id, reader)

    async def connect(
        self,
        _requests: object,
        context: "grpc.aio.ServicerContext[wire.ConnectRequest, bytes]",
    ) -> None:
        """Serve one gateway until it disconnects, violates the protocol or reads too slowly."""
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = cast("object", await context.read())
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "send Hello first")
        if not isinstance(first, wire.ConnectRequest) or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "send Hello first")
        hello = first.hello
        link = self._hub.connect(
            hello.gateway_id,
            takes_closings=hello.takes_closings,
            counts_prompts=hello.counts_prompts,
        )
        log.info("gateway_connected", gateway_id=link.gateway_id)
        status, reason = grpc.StatusCode.OK, "left"
        try:
            welcome = wire.Welcome(
                router_id=self._router_id, epoch=self._hub.next_epoch(), reads_prompt_ids=True
            )
            await context.write(wire.ConnectResponse(welcome=welcome).SerializeToString())
            self._hub.request(link, first)
            status, reason = await self._serve(link, context)
        except asyncio.CancelledError:
            reason = "disconnected"
            raise
        finally:
            self._hub.disconnect(link)
            log.info("gateway_disconnected", gateway_id=link.gateway_id, reason=reason)
        if status is not grpc.StatusCode.OK:
            await context.abort(status, reason)

    async def _serve(
        self,
        link: GatewayLink,
        context: "grpc.aio.ServicerContext[wire.ConnectRequest, bytes]",
    ) -> tuple[grpc.StatusCode, str]:
        """Read and write until the stream ends, and return its status and the reason."""
        async with asyncio.TaskGroup() as tasks:
            jobs = [
                tasks.create_task(self._read(link, context)),
                tasks.create_task(self._write(link, context)),
                tasks.create_task(self._wait_cut(link)),
                tasks.create_task(self._wait_end()),
            ]
            done, waiting = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in waiting:
                job.cancel()
        ending = next(iter(done)).result()
        self._hub.metrics.gateways_cut.inc(ending is _TOO_SLOW)
        return ending

    async def _read(
        self,
        link: GatewayLink,
        context: "grpc.aio.ServicerContext[wire.ConnectRequest, bytes]",
    ) -> tuple[grpc.StatusCode, str]:
        while True:
            message = cast("object", await context.read())
            if not isinstance(message, wire.ConnectRequest):  # the end is grpc.aio.EOF
                return grpc.StatusCode.OK, "left"
            try:
                self._hub.request(link, message)
            except ValueError as error:
                return grpc.StatusCode.INVALID_ARGUMENT, str(error)

    async def _write(
        self,
        link: GatewayLink,
        context: "grpc.aio.ServicerContext[wire.ConnectRequest, bytes]",
    ) -> tuple[grpc.StatusCode, str]:
        now = asyncio.get_running_loop().time
        while True:
            await link.ready.wait()
            if (data := link.take()) is not None:
                link.writing_since = now()
                try:
                    await context.write(data)
                except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
                    return grpc.StatusCode.UNAVAILABLE, f"the stream broke: {error}"
                link.writing_since = None

    async def _wait_cut(self, link: GatewayLink) -> tuple[grpc.StatusCode, str]:
        """Wait until the gateway has too much unsent output, or one write is too slow.

        The duration of writes is checked at intervals, because a timer for each write would add a
        tenth to the write's cost.
        """
        now = asyncio.get_running_loop().time
        while link.writing_since is None or now() - link.writing_since < _WRITE_TIMEOUT_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await link.cut.wait()
                    break
        return _TOO_SLOW

    async def _wait_end(self) -> tuple[grpc.StatusCode, str]:
        await self._ended.wait()
        await self._hub.flush(_WRITE_TIMEOUT_S)
        return grpc.StatusCode.OK, "the router is shutting down"
