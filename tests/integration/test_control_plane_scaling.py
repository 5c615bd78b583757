"""Scaling in real control planes: routers report, one leader decides, operators have the last word."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest
import pytest_asyncio

from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub
from tests.integration.conftest import ControlPlane, PostgresServer
from tests.integration.obedient_agent import node
from tests.links import trusted_channel

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DIGEST = "5c" * 32
INTERVAL_S = 0.5
BOUNDS = {"replicas_min": 1, "replicas_max": 6, "hold_s": 2.0, "minute_worth": 0.0}
_OUTPUT_TOKENS = 100  # of an answer
_TOKEN_US = 10_000  # so that a request is one second of a replica


class ReportingRouter:
    """A router that owns cells, and reports a demand that tests set."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.demand: dict[str, float] = {}  # work-seconds per second, by cell
        self.queued: dict[str, int] = {}
        self.state = wire.Objects()
        self.requests: dict[str, float] = {}
        self.number = 0
        self.intervals_ms: list[int] = []

    def report(self) -> wire.ReportDemandRequest:
        """Return the next report."""
        self.number += 1
        message = wire.ReportDemandRequest(router_id=self.router_id)
        for cell_id in self.demand:
            requests = int(self.requests.get(cell_id, 0.0))
            cell = message.cells.add(cell_id=cell_id, epoch=7, number=self.number)
            cell.tiers.add(
                priority=10,
                requests=requests,
                output_tokens=_OUTPUT_TOKENS * requests,
                queued=self.queued.get(cell_id, 0),
            )
            cell.speed.prompt_token_us, cell.speed.output_token_us = 100, _TOKEN_US
            cell.speed.sequences, cell.speed.steps = 8, 500
        return message

    async def run(self, address: str) -> None:
        """Report until cancelled; a control plane that is away is told later."""
        tick_s = 0.1
        async with trusted_channel(address) as channel:
            stub = ControlServiceStub(channel)
            watch = stub.Watch(
                wire.WatchRequest(
                    role=wire.ROLE_ROUTER, instance_id=self.router_id, address="127.0.0.1:9"
                )
            )
            try:
                while True:
                    for cell_id, demand in self.demand.items():
                        before = self.requests.get(cell_id, 0.0)
                        self.requests[cell_id] = before + demand * tick_s
                    try:
                        answer = await stub.ReportDemand(self.report(), timeout=5)
                        self.intervals_ms.append(answer.interval_ms)
                    except grpc.aio.AioRpcError:
                        pass
                    await asyncio.sleep(tick_s)
            finally:
                watch.cancel()


@asynccontextmanager
async def reporting(address: str, router_id: str = "router-s") -> AsyncIterator[ReportingRouter]:
    router = ReportingRouter(router_id)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(router.run(address))
        yield router
        running.cancel()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plane(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory, start_control_plane
) -> AsyncIterator[ControlPlane]:
    """A control plane that looks twice a second, and a node with room for everything."""
    await postgres_server.execute(f"CREATE DATABASE scaling TEMPLATE {postgres_server.template}")
    directory = tmp_path_factory.mktemp("scaling")
    async with (
        start_control_plane(
            postgres_server.url("scaling"),
            directory,
            CONTROL_PLANE__SCALING_INTERVAL_S=str(INTERVAL_S),
        ) as found,
        node(found, "node-s", "sim-s"),
    ):
        await found.put(f"bases/{DIGEST}", context_tokens_max=2048)
        yield found


async def _pool(plane: ControlPlane, pool_id: str, **bounds: object) -> None:
    await plane.put(f"pools/{pool_id}", base_digest=DIGEST, engine="sim-s", replicas_wanted=1)
    if bounds:
        await plane.put(f"pools/{pool_id}/scaling", **bounds)


async def _row(plane: ControlPlane, pool_id: str) -> dict:
    rows = (await plane.admin.get("/v1/scaling")).json()["data"]
    return next(row for row in rows if row["pool_id"] == pool_id)


async def _ready(plane: ControlPlane, pool_id: str) -> int:
    return (await plane.admin.get(f"/v1/pools/{pool_id}/status")).json()["ready"]


Eventually = Callable[..., Awaitable[None]]


async def test_demand_takes_a_pool_up_and_down_again(
    plane: ControlPlane, eventually: Eventually
) -> None:
    await _pool(plane, "tide", **BOUNDS)
    async with reporting(plane.grpc_address) as router:
        router.demand["tide-0"] = 0.4

        async def is_measured() -> bool:
            row = await _row(plane, "tide")
            return row["speed"] is not None and row["demand"] > 0.2

        await eventually(is_measured, "demand is known")
        assert (await _row(plane, "tide"))["wanted"] == 1
        router.demand["tide-0"] = 3.2

        async def has_grown() -> bool:
            return await _ready(plane, "tide") >= 4

        await eventually(has_grown, "the pool has the replicas that its demand needs")
        router.demand["tide-0"] = 0.3

        async def has_shrunk() -> bool:
            return await _ready(plane, "tide") == 1

        await eventually(has_shrunk, "the pool goes back to its minimum")
        changes = (await plane.admin.get("/v1/pools/tide/scaling/changes")).json()["data"]
        assert changes[0]["after"] == 1
        assert max(change["after"] for change in changes) <= BOUNDS["replicas_max"]
        assert set(router.intervals_ms) == {round(INTERVAL_S * 1000 / 3)}
