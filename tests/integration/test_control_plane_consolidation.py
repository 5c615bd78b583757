"""Replicas move together until a node is free, in real control planes, with one that ends."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.integration.conftest import ControlPlane, PostgresServer
from tests.integration.obedient_agent import GIB, ObedientAgent, node
from tests.integration.reporting_router import reporting

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DIGEST = "5d" * 32
BOUNDS = {"replicas_max": 2, "hold_s": 2.0, "minute_worth": 0.0, "sleepers_share": 0.0}
Eventually = Callable[..., Awaitable[None]]


@pytest_asyncio.fixture(loop_scope="session")
async def cloud() -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of a webhook, and the requests that it received."""
    told: list[dict[str, Any]] = []

    async def take(request: web.Request) -> web.Response:
        told.append(json.loads(await request.read()))
        return web.Response(status=202)

    app = web.Application()
    app.router.add_post("/nodes", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/nodes", told
    await runner.cleanup()


async def _pool(plane: ControlPlane, pool_id: str, wanted: int = 1, **bounds: object) -> None:
    fields = {"base_digest": DIGEST, "engine": "sim-m", "needs": {"memory_bytes": 2 * GIB}}
    await plane.put(f"pools/{pool_id}", **fields, replicas_wanted=wanted)
    await plane.put(f"pools/{pool_id}/scaling", **BOUNDS | {"replicas_min": wanted} | bounds)


@dataclass
class Site:
    """Two half full nodes of an actuator. The engines of the second node stay in their boot.

    Attributes:
        leader: The control plane that scales.
        plane: Another control plane, to which agents and router are connected.
        told: Requests that the actuator received.
    """

    leader: ControlPlane
    plane: ControlPlane
    second: ObedientAgent
    told: list[dict[str, Any]]

    async def states(self) -> dict[str, str]:
        """Return the states of the replicas of pool `left`, by node."""
        rows = (await self.plane.admin.get("/v1/replicas")).json()["data"]
        found = {row["node_id"]: row["state"] for row in rows if row["pool_id"] == "left"}
        assert "ready" in found.values(), "the pool never serves with less than it wants"
        return found


@pytest_asyncio.fixture(loop_scope="session")
async def site(
    postgres_server: PostgresServer,
    start_control_plane: Callable[..., Any],
    tmp_path: Path,
    cloud: tuple[str, list[dict[str, Any]]],
    eventually: Eventually,
) -> AsyncIterator[Site]:
    await postgres_server.execute(f"CREATE DATABASE moves TEMPLATE {postgres_server.template}")
    hook = {"name": "cloud", "kind": "webhook", "nodes": "cloud", "nodes_max": 4}
    hook |= {"url": cloud[0], "secret": "s3cret", "is_internal": True}
    actuators = tmp_path / "actuators.json"
    actuators.write_text(json.dumps([hook]))
    settings = {
        "CONTROL_PLANE__SCALING_INTERVAL_S": "0.5",
        "CONTROL_PLANE__SCALING_ACTUATORS": str(actuators),
        "CONTROL_PLANE__SCALING_CONSOLIDATION_HOLD_S": "3",
    }
    url = postgres_server.url("moves")
    async with AsyncExitStack() as stack, start_control_plane(url, tmp_path, **settings) as leader:
        await leader.put(f"bases/{DIGEST}", context_tokens_max=2048)
        await _pool(leader, "left")

        async def leads() -> bool:
            text = (await leader.admin.get("/metrics")).text
            return 'sluice_pool_replicas_wanted{pool="left"}' in text

        await eventually(leads, "the first control plane scales")
        plane = await stack.enter_async_context(start_control_plane(url, tmp_path, **settings))
        router = await stack.enter_async_context(reporting(plane.grpc_address))
        router.demand["left-0"] = 0.0
        first = await stack.enter_async_context(node(plane, "cloud-a", "sim-m"))
        await eventually(lambda: bool(first.desired.replicas), "the first node has a replica")
        orders = "/v1/nodes/cloud-a/desired"
        await plane.admin.put(orders, json={"is_unschedulable": True})
        second = await stack.enter_async_context(node(plane, "cloud-b", "sim-m"))
        await _pool(plane, "right")
        await _pool(plane, "hired", 0, actuator="cloud", idle_s=1.0)
        router.demand |= {"right-0": 0.0, "hired-0": 0.0}
        await eventually(lambda: bool(second.desired.replicas), "and the second one")
        second.boots = True
        await plane.admin.put(orders, json={})
        yield Site(leader, plane, second, cloud[1])


async def test_two_nodes_half_full_become_one_and_the_leader_may_end_meanwhile(
    site: Site, eventually: Eventually
) -> None:
    plane, text = site.plane, "cloud-a becomes empty, and actuator cloud then ends it"

    async def begins() -> bool:
        return await site.states() == {"cloud-a": "ready", "cloud-b": "starting"}

    await eventually(begins, "the new replica boots before the old one leaves")

    async def is_explained() -> bool:
        told = (await plane.admin.get("/v1/scaling")).json()["data"]
        reasons = next(row["reasons"] for row in told if row["pool_id"] == "left")
        return reasons[-1]["cause"] == "move" and text in reasons[-1]["text"]

    await eventually(is_explained, "the pool's reasons tell the move")
    await site.leader.child.stop()
    assert await begins()
    await site.second.finish_boots()

    async def is_over() -> bool:
        return await site.states() == {"cloud-b": "ready"}

    await eventually(is_over, "the old replica has left")
    await eventually(
        lambda: any(it["nodes_to_end"] == ["cloud-a"] for it in site.told),
        "the free node is given back",
    )
    assert not any("cloud-b" in it["nodes_to_end"] for it in site.told)
    changes = (await plane.admin.get("/v1/pools/left/scaling/changes")).json()["data"]
    moved = [it["text"] for it in changes if it["cause"] == "move"]
    assert moved[0].endswith("has left cloud-a for cloud-b, and cloud-a is empty")
    assert text in moved[1]
    assert len(moved) == 2
    metrics = (await plane.admin.get("/metrics")).text
    assert 'control_plane_replica_moves_total{result="done"} 1.0' in metrics
