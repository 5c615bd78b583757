"""Whether routers answer, over real gRPC: a server whose pings can be held back."""

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


class Router(RouterServiceServicer):
    """Answers while it is not frozen; the calls of meanwhile are answered when it thaws."""

    def __init__(self) -> None:
        self.is_moving = asyncio.Event()
        self.is_moving.set()
        self.pings = 0
        self.address = ""

    async def Ping(self, request, context) -> wire.PingResponse:  # noqa: N802 - gRPC's name
        self.pings += 1
        await self.is_moving.wait()
        return wire.PingResponse()


@asynccontextmanager
async def running(router: Router) -> AsyncIterator[Presence]:
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


async def test_a_frozen_router_is_gone_until_it_answers_again() -> None:
    router = Router()
    async with running(router) as presence:
        await until(lambda: router.pings > 3)
        router.is_moving.clear()
        await asyncio.sleep(LIMIT_S / 2)
        assert presence.here() == {"r": router.address}, "busy for a moment is not frozen"
        router.is_moving.set()
        seen = router.pings
        await until(lambda: router.pings > seen + 2)
        router.is_moving.clear()
        await until(lambda: not presence.here())
        assert presence.gone == {"r"}
        assert presence.departed == {"r": router.address}
        router.is_moving.set()
        await until(presence.here)
        assert (presence.gone, presence.departed) == (set(), {})


async def test_one_that_never_answered_may_be_out_of_reach() -> None:
    router = Router()
    router.is_moving.clear()
    async with running(router) as presence:
        await until(lambda: router.pings)
        await asyncio.sleep(2 * LIMIT_S)
        assert presence.here() == {"r": router.address}


async def test_one_that_knows_no_pings_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Router, "Ping")
    async with running(Router()) as presence:
        await asyncio.sleep(2 * LIMIT_S)
        assert presence.here()
