"""Whether routers live, over real gRPC: a server whose signs of life can be held back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from control_plane.fleet.liveness import NAP_S, SILENT_NAPS_MAX, Liveness
from control_plane.fleet.presence import Presence
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import (
    RouterServiceServicer,
    add_RouterServiceServicer_to_server,
)

pytestmark = pytest.mark.real
LIMIT_S = NAP_S * SILENT_NAPS_MAX


class Frozen(RouterServiceServicer):
    """Knows neither signs of life nor pings, and can be frozen."""

    def __init__(self) -> None:
        self.is_moving = asyncio.Event()
        self.is_moving.set()
        self.signs = 0
        self.address = ""


class PingedRouter(Frozen):
    """Of the last release: calls of a frozen time are answered when it thaws."""

    async def Ping(self, request, context) -> wire.PingResponse:  # noqa: N802 - gRPC's name
        self.signs += 1
        await self.is_moving.wait()
        return wire.PingResponse()


class LivingRouter(Frozen):
    """Streams signs of life while it is not frozen."""

    async def Live(self, request, context) -> AsyncIterator[wire.LiveResponse]:  # noqa: N802
        while True:
            self.signs += 1
            await self.is_moving.wait()
            yield wire.LiveResponse()
            await asyncio.sleep(0.25)


KINDS = pytest.mark.parametrize("kind", [LivingRouter, PingedRouter])


@asynccontextmanager
async def running(router: Frozen) -> AsyncIterator[Presence]:
    """A router with an open watch, and what looks after it."""
    server = grpc.aio.server()
    add_RouterServiceServicer_to_server(router, server)
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    presence = Presence(lambda: None)
    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(Liveness(presence).run())
        with presence.present("r", router.address):
            yield presence
        looking.cancel()
    await server.stop(0)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)


@KINDS
async def test_a_frozen_router_is_gone_until_it_is_heard_again(kind: type[Frozen]) -> None:
    router = kind()
    async with running(router) as presence:
        await until(lambda: router.signs > 3)
        router.is_moving.clear()
        await asyncio.sleep(LIMIT_S / 2)
        assert presence.here() == {"r": router.address}, "busy for a moment is not frozen"
        router.is_moving.set()
        seen = router.signs
        await until(lambda: router.signs > seen + 2)
        router.is_moving.clear()
        await until(lambda: not presence.here())
        assert presence.gone == {"r"}
        assert presence.departed == {"r": router.address}
        router.is_moving.set()
        await until(presence.here)
        assert (presence.gone, presence.departed) == (set(), {})


@KINDS
async def test_one_that_was_never_heard_may_be_out_of_reach(kind: type[Frozen]) -> None:
    router = kind()
    router.is_moving.clear()
    async with running(router) as presence:
        await until(lambda: router.signs)
        await asyncio.sleep(2 * LIMIT_S)
        assert presence.here() == {"r": router.address}


async def test_one_that_knows_no_signs_and_no_pings_lives() -> None:
    async with running(Frozen()) as presence:
        await asyncio.sleep(2 * LIMIT_S)
        assert presence.here()


async def test_a_stream_that_ends_is_opened_again() -> None:
    class Ending(LivingRouter):
        async def Live(self, request, context) -> AsyncIterator[wire.LiveResponse]:  # noqa: N802
            self.signs += 1
            yield wire.LiveResponse()

    router = Ending()
    async with running(router) as presence:
        await until(lambda: router.signs > 10)
        assert presence.here()
