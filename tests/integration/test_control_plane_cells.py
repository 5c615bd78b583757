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

        async def are_known() -> bool:
            listed = (await plane.admin.get("/v1/routers")).json()["data"]
            return {found["id"] for found in listed} == set(names)

        await eventually(are_known, "both routers are known")
        for pool_id in ("a", "b"):
            await plane.put(f"pools/{pool_id}", base_digest=DIGEST, engine="sim", replicas_wanted=0)
        await eventually(lambda: made.owners() == set(names), "each owns a cell")
        yield made


@pytest.fixture
def start_site(
    control_plane, eventually, tmp_path: Path
) -> Callable[[], AbstractAsyncContextManager[Site]]:
    return lambda: running_site(control_plane, eventually, tmp_path)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
async def test_the_cell_of_a_router_that_ends_moves_to_the_other(
    start_site, eventually, how: signal.Signals
) -> None:
    async with start_site() as site:
        loser = site.owner("a-0")
        (heir,) = set(site.routers) - {loser}
        before = site.epochs()
        os.kill(site.routers[loser].pid, how)
        await eventually(lambda: site.owner("a-0") == heir, "it moves")
        assert site.owner("b-0") == heir
        assert site.epochs() == before | {"a-0": before["a-0"] + 1}


async def test_a_goodbye_moves_cells_though_the_router_still_serves(
    start_site, control_plane, eventually
) -> None:
    """What a router says at SIGTERM, before it finishes what it has."""
    async with start_site() as site:
        leaver = site.owner("a-0")
        (heir,) = set(site.routers) - {leaver}
        async with trusted_channel(control_plane.grpc_address) as channel:
            await ControlServiceStub(channel).Leave(wire.LeaveRequest(instance_id=leaver))
        await eventually(lambda: site.owners() == {heir}, "its cell moves")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
async def test_no_cell_moves_when_the_control_plane_is_started_again(
    start_site, control_plane, eventually, how: signal.Signals
) -> None:
    plane = control_plane
    async with start_site() as site:
        before = site.epochs()
        os.kill(plane.child.pid, how)
        await plane.child.wait()
        again = await ChildProcess.start(plane.spec)
        try:
            await again.wait_ready(WAIT_S)

            async def are_back() -> bool:
                listed = (await plane.admin.get("/v1/routers")).json()["data"]
                return all(not found["left_at"] for found in listed)

            await eventually(are_back, "the routers are back")
            await plane.put("pools/c", base_digest=DIGEST, engine="sim", replicas_wanted=0)
            await eventually(
                lambda: bool(site.watcher.state.cells.get("c-0", wire.Cell()).router_id),
                "new cells are assigned",
            )
            assert before.items() <= site.epochs().items()
        finally:
            await again.stop()
