"""A router that sends nonsense costs its own link, never the gateway."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.router_link import RouterLink
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import NeverLags

pytestmark = pytest.mark.real

NONSENSE = [
    wire.ConnectResponse(handle=[1, 2], count=[1], token=[7]).SerializeToString(),
    wire.ConnectResponse(handle=[1], count=[1], token=[7, 8]).SerializeToString(),
    b"\xff\xff\xff",
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=["columns", "tokens", "no message"])
async def test_nonsense_ends_the_link_which_comes_back(nonsense: bytes) -> None:
    connections = 0

    async def connect(
        requests: AsyncIterator[wire.ConnectRequest],
        context: "grpc.aio.ServicerContext[wire.ConnectRequest, bytes]",
    ) -> None:
        nonlocal connections
        connections += 1
        welcome = wire.Welcome(router_id="r", epoch=1)
        await context.write(wire.ConnectResponse(welcome=welcome).SerializeToString())
        await context.write(nonsense)
        async for _ in requests:
            pass

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(connect, wire.ConnectRequest.FromString)
    name = "sluice.wire.router.v1.RouterService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {"Connect": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = RouterLink(f"127.0.0.1:{port}", "gateway", lambda: None, AttemptPace(NeverLags()))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(link.run())
        while connections < 2 and not run.done():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        run.cancel()
    await server.stop(None)
    assert connections >= 2
