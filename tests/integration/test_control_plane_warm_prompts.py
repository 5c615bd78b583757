"""Warm prompts on a real PostgreSQL: told to gateways, gone with their model, never in the audit."""

import asyncio
import json

import pytest

from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

BASE = "ab" * 32
MODEL = "warm/model"
PATH = f"/v1/warm-prompts/{MODEL}"


async def test_gateways_hear_of_them_until_their_model_goes(
    shared_control_plane, eventually
) -> None:
    plane = shared_control_plane
    await plane.put(f"bases/{BASE}", context_tokens_max=1000)
    await plane.put("pools/warm", base_digest=BASE, engine="sim", replicas_wanted=0)
    unknown = await plane.admin.put(PATH, json={"prompts": ["a secret"]})
    assert unknown.status_code in {400, 409}, unknown.text
    await plane.put(f"models/{MODEL}", base_digest=BASE, pool_id="warm")
    for prompts in ([], [""], ["a"] * 5):
        refused = await plane.admin.put(PATH, json={"prompts": prompts})
        assert refused.status_code == 400, refused.text
    made = await plane.admin.put(PATH, json={"prompts": ["a secret", "b"]})
    assert made.status_code == 201, made.text
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "warm")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        await eventually(lambda: MODEL in watcher.state.warm_prompts, "they are known")
        assert list(watcher.state.warm_prompts[MODEL].prompts) == ["a secret", "b"]
        query = {"kind": "warm-prompts", "object_id": MODEL}
        rows = (await plane.admin.get("/v1/audit", params=query)).json()["data"]
        assert rows
        assert "secret" not in json.dumps(rows)
        assert (await plane.admin.delete(f"/v1/models/{MODEL}")).status_code == 204
        await eventually(lambda: MODEL not in watcher.state.warm_prompts, "they have gone")
        running.cancel()
