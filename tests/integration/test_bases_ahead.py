"""A base is on the node of the next replica before the replica is, in a real control plane."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sluice.manifests import Manifest
from tests.integration.conftest import ControlPlane, PostgresServer
from tests.integration.distribution_site import Node, options, publish, running_node
from tests.integration.obedient_agent import GIB, ObedientAgent, node
from tests.integration.reporting_router import reporting

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

BOUNDS = {"replicas_max": 2, "minute_worth": 0.0, "sleepers_share": 0.0}
_RATE = 10e6  # bytes per second of a node's link, so that a fetch of the base takes 3 s
Eventually = Callable[..., Awaitable[None]]


@dataclass
class Site:
    """A pool with one replica on the first of two nodes, whose base is in the store."""

    plane: ControlPlane
    base: Manifest
    second: Node
    agent: ObedientAgent

    async def next_nodes(self) -> list[str]:
        rows = (await self.plane.admin.get("/v1/scaling")).json()["data"]
        return next(row["next_nodes"] for row in rows if row["pool_id"] == "grows")


@pytest_asyncio.fixture(loop_scope="session")
async def site(
    request: pytest.FixtureRequest,
    postgres_server: PostgresServer,
    start_control_plane: Callable[..., Any],
    tmp_path: Path,
    eventually: Eventually,
) -> AsyncIterator[Site]:
    name, store = f"ahead{request.param}", tmp_path / "store"
    await postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_server.template}")
    url = postgres_server.url(name)
    base = await publish(url, store, tmp_path / "source")
    settings = {
        "CONTROL_PLANE__SCALING_INTERVAL_S": "0.5",
        "CONTROL_PLANE__SCALING_PREFETCH_BASES": str(request.param),
    }
    async with AsyncExitStack() as stack, start_control_plane(url, tmp_path, **settings) as plane:
        router = await stack.enter_async_context(reporting(plane.grpc_address))
        await plane.put(f"bases/{base.digest}", context_tokens_max=2048)
        fields = {"base_digest": base.digest, "engine": "sim-h", "replicas_wanted": 1}
        await plane.put("pools/grows", **fields, needs={"memory_bytes": GIB})
        router.demand["grows-0"] = 0.0
        nodes: list[Node] = []
        for node_id in ("first", "second"):
            agent = await stack.enter_async_context(node(plane, node_id, "sim-h"))
            found = options(tmp_path / node_id, plane.grpc_address, store, _RATE)
            nodes.append(await stack.enter_async_context(running_node(found)))
            if node_id == "first":
                await eventually(lambda: nodes[0].is_whole(base), "the first replica has its base")
        await plane.put("pools/grows/scaling", **BOUNDS)
        yield Site(plane, base, nodes[1], agent)


async def _grow(site: Site, eventually: Eventually) -> float:
    """Request a second replica, and return the seconds until its node has the base."""
    began_s = time.monotonic()
    answer = await site.plane.admin.post("/v1/pools/grows/scaling/pin", json={"replicas": 2})
    assert answer.status_code == 200, answer.text
    await eventually(lambda: bool(site.agent.desired.replicas), "the second node has a replica")
    await eventually(lambda: site.second.is_whole(site.base), "and its base")
    return time.monotonic() - began_s


@pytest.mark.parametrize("site", [2], indirect=True)
async def test_the_node_of_the_next_replica_has_the_base_before(
    site: Site, eventually: Eventually, record_property: Callable[[str, object], None]
) -> None:
    await eventually(lambda: site.second.is_whole(site.base), "the base is fetched ahead")
    assert not site.agent.desired.replicas
    assert await site.next_nodes() == ["second"]
    fetched = dict(site.second.bytes_from)
    record_property("seconds", await _grow(site, eventually))
    assert site.second.bytes_from == fetched, "the replica fetches nothing"

    async def is_over() -> bool:
        return await site.next_nodes() == []

    await eventually(is_over, "a pool at its maximum expects no replica")


@pytest.mark.parametrize("site", [0], indirect=True)
async def test_without_prefetch_a_base_is_fetched_for_the_replica(
    site: Site, eventually: Eventually, record_property: Callable[[str, object], None]
) -> None:
    await asyncio.sleep(6.0)  # longer than the control plane's pause between two reads
    assert not any(site.second.bytes_from.values())
    assert await site.next_nodes() == []
    record_property("seconds", await _grow(site, eventually))
    assert any(site.second.bytes_from.values())
