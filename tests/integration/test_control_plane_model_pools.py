"""The pools of a model on a real PostgreSQL: checked, told to gateways, gone with their model."""

import asyncio

import pytest

from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

BASE, SMALL = "ab" * 32, "cd" * 32
MODEL = "shared/model"
PATH = f"/v1/model-pools/{MODEL}"


async def test_gateways_hear_of_the_pools_of_a_model_until_it_goes(
    shared_control_plane, eventually
) -> None:
    plane = shared_control_plane
    for base in (BASE, SMALL):
        await plane.put(f"bases/{base}", context_tokens_max=1000)
    for pool, base, engine in (
        ("shared-own", BASE, "sim"),
        ("shared-twin", BASE, "sim"),
        ("shared-small", SMALL, "sim"),
        ("shared-vectors", BASE, "embed"),
    ):
        await plane.put(f"pools/{pool}", base_digest=base, engine=engine, replicas_wanted=0)
    await plane.put(f"models/{MODEL}", base_digest=BASE, pool_id="shared-own")
    own, twin, small = ({"pool_id": f"shared-{it}"} for it in ("own", "twin", "small"))
    for pools, reason in (
        ([own], "pools"),
        ([own, own], "twice"),
        ([twin, small], "own pool"),
        ([own, {"pool_id": "shared-none"}], "no pool"),
        ([own, {"pool_id": "shared-vectors"}], "embeddings"),
        ([own, small], "is_other_base"),
        ([own, twin | {"weight": 0.0}], "weight"),
    ):
        refused = await plane.admin.put(PATH, json={"pools": pools})
        assert refused.status_code == 400, refused.text
        assert reason in refused.text
    allowed = small | {"is_other_base": True, "price": 0.5}
    made = await plane.admin.put(PATH, json={"pools": [own, twin | {"weight": 2.0}, allowed]})
    assert made.status_code == 201, made.text
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "shared")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        await eventually(lambda: MODEL in watcher.state.model_pools, "they are known")
        told = list(watcher.state.model_pools[MODEL].pools)
        assert [(it.pool_id, it.weight, it.price, it.is_other_base) for it in told] == [
            ("shared-own", 1.0, 1.0, False),
            ("shared-twin", 2.0, 1.0, False),
            ("shared-small", 1.0, 0.5, True),
        ]
        kept = await plane.admin.delete("/v1/pools/shared-twin")
        assert (kept.status_code, MODEL in kept.text) == (409, True), kept.text
        assert (await plane.admin.delete(f"/v1/models/{MODEL}")).status_code == 204
        await eventually(lambda: MODEL not in watcher.state.model_pools, "they have gone")
        assert (await plane.admin.delete("/v1/pools/shared-twin")).status_code == 204
        running.cancel()
