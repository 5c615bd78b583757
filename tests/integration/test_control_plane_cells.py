"""Cells change their router: real routers that are killed, told to end, or lose sight of us."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from sluice.process import ChildProcess
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub
from tests.links import trusted_channel
from tests.support.routers import running_router

pytestmark = pytest.mark.real

DIGEST = "fa" * 32
WAIT_S = 60.0


@asynccontextmanager
async def watching(address: str) -> AsyncIterator[ControlWatcher]:
    watcher = ControlWatcher(address, wire.ROLE_GATEWAY, "observer")
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(watcher.run())
        assert await watcher.wait_synced(WAIT_S)
        yield watcher
        following.cancel()


class Site:
    """A control plane with two routers, which own a cell each."""

    def __init__(self, watcher: ControlWatcher, routers: dict[str, ChildProcess]) -> None:
        self.watcher = watcher
        self.routers = routers

    def owner(self, cell_id: str) -> str:
        return self.watcher.state.cells[cell_id].router_id

    def owners(self) -> set[str]:
        return {cell.router_id for cell in self.watcher.state.cells.values()}

    def epochs(self) -> dict[str, int]:
        return {cell.id: cell.epoch for cell in self.watcher.state.cells.values()}


@asynccontextmanager
async def running_site(plane, eventually, tmp_path: Path) -> AsyncIterator[Site]:
    names = ["one", "two"]
    await plane.put(f"bases/{DIGEST}", context_tokens_max=2048)
    async with AsyncExitStack() as stack:
        routers = {
            name: await stack.enter_async_context(
                running_router(name, plane.grpc_address, tmp_path)
            )
            for name in names
        }
        watcher = await stack.enter_async_context(watching(plane.grpc_address))
        made = Site(watcher, routers)
        stack.push_async_callback(_stop_all, routers)

        async def are_known() -> bool:
            listed = (await plane.admin.get("/v1/routers")).json()["data"]
            return {found["id"] for found in listed} == set(names)

        await eventually(are_known, "both routers are known")
        for pool_id in ("a", "b"):
            await plane.put(f"pools/{pool_id}", base_digest=DIGEST, engine="sim", replicas_wanted=0)
        await eventually(lambda: made.owners() == set(names), "each owns a cell")
        yield made


async def _stop_all(routers: dict[str, ChildProcess]) -> None:
    for router in routers.values():
        await router.stop()


@pytest.fixture
def start_site(
    control_plane, eventually, tmp_path: Path
) -> Callable[[], AbstractAsyncContextManager[Site]]:
    return lambda: running_site(control_plane, eventually, tmp_path)


async def test_the_cell_of_a_router_that_leaves_moves_to_the_other(
    start_site, control_plane, eventually
) -> None:
    async with start_site() as site:
        for how in (_say_goodbye, _kill, _tell_to_end):
            loser = site.owner("a-0")
            (heir,) = set(site.routers) - {loser}
            before = site.epochs()
            moved = [cell for cell in before if site.owner(cell) == loser]
            await how(control_plane, site, loser)
            await eventually(lambda heir=heir: site.owners() == {heir}, "they move")
            assert site.epochs() == before | {cell: before[cell] + 1 for cell in moved}
            await _restart(control_plane, site, loser, eventually)


async def _say_goodbye(plane, _: Site, name: str) -> None:
    """What a router says at SIGTERM, before it finishes what it has: it still serves."""
    async with trusted_channel(plane.grpc_address) as channel:
        await ControlServiceStub(channel).Leave(wire.LeaveRequest(instance_id=name))


async def _kill(_: object, site: Site, name: str) -> None:
    os.kill(site.routers[name].pid, signal.SIGKILL)


async def _tell_to_end(_: object, site: Site, name: str) -> None:
    os.kill(site.routers[name].pid, signal.SIGTERM)


async def _restart(plane, site: Site, name: str, eventually) -> None:
    """Start a router again, after its end, and wait until it may own cells."""
    ended = site.routers[name]
    await ended.stop()
    site.routers[name] = await ChildProcess.start(ended.spec)
    await site.routers[name].wait_ready(WAIT_S)
    await eventually(lambda: _are_here(plane), "it may own cells")


async def _are_here(plane) -> bool:
    listed = (await plane.admin.get("/v1/routers")).json()["data"]
    return all(not found["left_at"] for found in listed)


async def test_no_cell_moves_when_the_control_plane_is_started_again(
    start_site, control_plane, eventually
) -> None:
    async with start_site() as site, AsyncExitStack() as stack:
        before = site.epochs()
        running = control_plane.child
        for how, pool in ((signal.SIGKILL, "c"), (signal.SIGTERM, "d")):
            os.kill(running.pid, how)
            await running.wait()
            running = await ChildProcess.start(control_plane.spec)
            stack.push_async_callback(running.stop)
            await running.wait_ready(WAIT_S)
            await eventually(lambda: _are_here(control_plane), "the routers are back")
            await control_plane.put(
                f"pools/{pool}", base_digest=DIGEST, engine="sim", replicas_wanted=0
            )
            await eventually(
                lambda cell=f"{pool}-0": bool(
                    site.watcher.state.cells.get(cell, wire.Cell()).router_id
                ),
                "new cells are assigned",
            )
            assert before.items() <= site.epochs().items()
