"""Waiting work in one pool wakes a sleeping replica of another pool of the same model."""

import pytest

from tests.integration.obedient_agent import node
from tests.integration.reporting_router import reporting

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DIGEST = "6d" * 32
BOUNDS = {"replicas_max": 2, "hold_s": 2.0, "minute_worth": 0.0, "idle_s": 1.0}


async def test_a_sleeper_of_another_pool_wakes_before_the_next_plan(
    postgres_server, eventually, start_control_plane, tmp_path
) -> None:
    name, interval_s = "pool_wakes", "4"
    await postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_server.template}")
    settings = {"CONTROL_PLANE__SCALING_INTERVAL_S": interval_s}
    async with (
        start_control_plane(postgres_server.url(name), tmp_path, **settings) as plane,
        node(plane, "node-o", "sim"),
        reporting(plane.grpc_address, "router-o") as router,
    ):
        await plane.put(f"bases/{DIGEST}", context_tokens_max=2048)
        for pool_id in ("own", "far"):
            await plane.put(f"pools/{pool_id}", base_digest=DIGEST, engine="sim", replicas_wanted=1)
        await plane.put("models/m", base_digest=DIGEST, pool_id="own")
        await plane.put("model-pools/m", pools=[{"pool_id": "own"}, {"pool_id": "far"}])
        router.demand = {"own-0": 0.0, "far-0": 0.0}
        await plane.put("pools/own/scaling", **BOUNDS, replicas_min=1, sleepers_share=0.0)
        await plane.put("pools/far/scaling", **BOUNDS, replicas_min=0, sleepers_min=1)

        async def states(pool_id: str) -> list[str]:
            answer = await plane.admin.get("/v1/replicas", params={"pool_id": pool_id})
            return [row["state"] for row in answer.json()["data"]]

        async def rests() -> bool:
            return (await states("own"), await states("far")) == (["ready"], ["sleeping"])

        await eventually(rests, "the other pool sleeps")
        changes = "/v1/pools/far/scaling/changes"
        before = (await plane.admin.get(changes)).json()["data"]
        router.requests["own-0"], router.queued["own-0"] = 5.0, 40

        async def wakes() -> bool:
            return await states("far") == ["ready"]

        await eventually(wakes, "its sleeper serves")
        after = (await plane.admin.get(changes)).json()["data"]
        new = [it for it in after if it["id"] not in {one["id"] for one in before}]
        assert new[-1]["cause"] == "wake", new
        assert "another pool" in new[-1]["text"]
