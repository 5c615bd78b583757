"""Operators take nodes out of service, by REST and CLI; agents that do at once what they are told."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from cli.app import app
from sluice.ids import new_id
from tests.integration.conftest import ADMIN_KEY
from tests.integration.obedient_agent import GIB, node

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DIGEST = "ed" * 32


@pytest.fixture
def sluice(shared_control_plane, monkeypatch):
    """Run a command; return what it says."""
    monkeypatch.setenv("SLUICE_ADMIN_URL", str(shared_control_plane.admin.base_url))
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)

    async def run(*words: str, status: int = 0) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["fleet", *words])
        assert done.exit_code == status, (words, done.output)
        return done.output

    return run


async def _pool(plane, engine: str, **fields: object) -> str:
    pool_id = new_id("pool")
    await plane.put(f"bases/{DIGEST}", context_tokens_max=2048)
    await plane.put(f"pools/{pool_id}", base_digest=DIGEST, engine=engine, **fields)
    return pool_id


async def _status(plane, pool_id: str) -> dict:
    return (await plane.admin.get(f"/v1/pools/{pool_id}/status")).json()


async def test_a_cordoned_node_gets_nothing_and_a_drained_one_is_empty(
    shared_control_plane, eventually, sluice
) -> None:
    plane = shared_control_plane
    one, two = new_id("node"), new_id("node")
    pool = {"needs": {"memory_bytes": 2 * GIB}}
    async with node(plane, one, "sim-d") as first:
        pool_id = await _pool(plane, "sim-d", replicas_wanted=2, **pool)

        async def is_ready(count: int) -> bool:
            return (await _status(plane, pool_id))["ready"] == count

        await eventually(lambda: is_ready(2), "both are on the one node")
        assert "work" in await sluice("nodes", "cordon", one, "--reason", "work")
        await plane.put(
            f"pools/{pool_id}", base_digest=DIGEST, engine="sim-d", replicas_wanted=3, **pool
        )

        async def says(text: str) -> bool:
            return (await _status(plane, pool_id))["condition"] == text

        why = (
            "2 of 3 placed: all nodes with engine sim-d are lost, cordoned, draining or distrusted"
        )
        await eventually(lambda: says(why), "there is no place for the third")
        assert why in await sluice("pool", "show", pool_id)
        async with node(plane, two, "sim-d") as second:
            await eventually(lambda: is_ready(3), "there is now")
            await eventually(lambda: says(""), "and nothing is amiss")
            assert len(first.desired.replicas) == 2, "what runs on a cordoned node goes on"
            told = await sluice("nodes", "drain", one)
            assert f"node {one} is empty" in told
            assert len(second.desired.replicas) == 3
            assert await is_ready(3)
            shown = json.loads(await sluice("nodes", "show", one, "--json"))
            assert (shown["replicas"], shown["is_draining"]) == (0, True)
            await sluice("nodes", "uncordon", one)
            await sluice("nodes", "drain", two, "--no-wait")
            await eventually(lambda: len(first.desired.replicas) == 3, "and all the way back")
            rows = json.loads(await sluice("hours", "--by", "node", "--from", "1h", "--json"))
            recorded = {row["name"]: row for row in rows}
            for node_id in (one, two):
                hours = recorded[node_id]
                assert hours["replica_hours"] == hours["unassigned_hours"] > 0
                assert hours["running_hours"] > 0
            assert pool_id in await sluice("hours", "--by", "hour")
    rows = (await plane.admin.get("/v1/audit", params={"object_id": one})).json()["data"]
    assert [row["action"] for row in rows] == ["change"] * 3
    assert "is not lost" in await sluice("nodes", "forget", one, status=1)


async def test_orders_are_conditional_and_nodes_must_be_there(
    shared_control_plane, eventually
) -> None:
    plane = shared_control_plane
    node_id = new_id("node")
    path = f"/v1/nodes/{node_id}/desired"
    assert (await plane.admin.put(path, json={})).status_code == 404

    async def is_known() -> bool:
        return (await plane.admin.get(f"/v1/nodes/{node_id}")).status_code == 200

    assert not await is_known()
    async with node(plane, node_id, "sim-o"):
        await eventually(is_known, "its agent's report was written down")
    tag = {"If-Match": (await plane.admin.get(path)).headers["ETag"]}
    put = await plane.admin.put(path, json={"is_draining": True}, headers=tag)
    orders = {"is_unschedulable": True, "is_draining": True, "reason": ""}
    assert put.json() == {"id": node_id} | orders
    assert (await plane.admin.put(path, json={}, headers=tag)).status_code == 412
    gone = await plane.admin.delete(f"/v1/nodes/{node_id}/cordons/none@1")
    assert gone.status_code == 404


async def test_accelerators_are_given_and_their_cordons_lifted(
    shared_control_plane, eventually, sluice
) -> None:
    plane = shared_control_plane
    node_id = new_id("node")
    needs = {"accelerators": 2, "accelerator_memory_bytes": 80 * GIB, "is_dedicated": True}
    async with node(plane, node_id, "sim-g", accelerators=3, cordon="GPU-1@1.500") as found:
        pool_id = await _pool(plane, "sim-g", replicas_wanted=2, needs=needs)

        async def says(text: str) -> bool:
            return text in (await _status(plane, pool_id))["condition"]

        await eventually(lambda: says("0 of 2 placed: all nodes"), "its agent cordons it")
        assert "GPU-1@1.500" in await sluice("nodes", "show", node_id)
        assert "lifted GPU-1@1.500" in await sluice("nodes", "lift", node_id)
        await eventually(lambda: len(found.desired.replicas) == 1, "the agent lifted it", 60)
        assert list(found.desired.replicas[0].accelerators) == [0, 1]
        await eventually(
            lambda: says("1 of 2 placed: no node has 2 accelerators of 80 GiB unused"),
            "one is left",
        )
        metrics = (await plane.admin.get("/metrics")).text
        assert "control_plane_replicas_unplaced_count" in metrics
        await eventually(lambda: not found.desired.lifted_cordons, "it is told no longer", 60)
        assert "no accelerator" in await sluice("nodes", "lift", node_id)
        await plane.put(
            f"pools/{pool_id}", base_digest=DIGEST, engine="sim-g", replicas_wanted=0, needs=needs
        )
