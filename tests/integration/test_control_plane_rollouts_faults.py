"""What is wrong with one rollout does not hold up the others."""

from pathlib import Path

import asyncpg
import pytest

from tests.integration.rollout_site import (
    LONG,
    begin,
    make_fleet,
    make_model,
    reaches,
    running_gateway,
)

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]


async def _begin(plane, model: str) -> str:
    await make_model(plane, model)
    return await begin(plane, model, plan=LONG)


@pytest.mark.timeout(300)
async def test_others_are_stepped_beside_one_that_is_held_or_unreadable(
    database_url: str, start_control_plane, tmp_path: Path, eventually
) -> None:
    database = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        async with (
            start_control_plane(database_url, tmp_path) as plane,
            running_gateway(plane.grpc_address),
        ):
            await make_fleet(plane)
            stuck = await _begin(plane, "stuck")
            holding = database.transaction()
            await holding.start()
            await database.execute("SELECT FROM rollouts WHERE id = $1 FOR UPDATE", stuck)
            other = await _begin(plane, "other")
            await eventually(reaches(plane, other, share=1000), "another one goes on beside it")

            # Its state is of a version to come; and the model has taken over, but not settled.
            await database.execute("UPDATE rollouts SET state = '{}' WHERE id = $1", stuck)
            await database.execute("UPDATE models SET release = 'new' WHERE id = 'stuck'")
            await database.execute("DELETE FROM splits WHERE id = 'stuck'")
            await holding.commit()
            log = tmp_path / f"{plane.spec.name}.log"
            await eventually(lambda: "rollout_unreadable" in log.read_text(), "it is said")
            await _is_shown(plane, stuck, other)
            refused = await plane.admin.delete("/v1/releases/stuck@old")
            assert refused.status_code == 409, refused.text
            assert stuck in refused.json()["detail"]

            await database.execute("DELETE FROM releases WHERE id = 'other@new'")
            aborted = await plane.admin.post(f"/v1/rollouts/{other}/abort")
            assert aborted.status_code == 200, aborted.text
            over = reaches(plane, other, is_live=False, share=0)
            await eventually(over, "what is not there any more is not waited for")

            for command in ("pause", "resume", "abort"):
                told = await plane.admin.post(f"/v1/rollouts/{stuck}/{command}")
                assert told.status_code == (200 if command == "abort" else 409), told.text
            assert told.json()["problem"] == "", "its state is one again"
            over = reaches(plane, stuck, phase="aborted", is_live=False, share=0, problem="")
            await eventually(over, "people can end what nobody can read")
    finally:
        await database.close()


async def _is_shown(plane, stuck: str, other: str) -> None:
    """One that nobody can read is shown as that, and hides no other one."""
    listed = (await plane.admin.get("/v1/rollouts")).json()["data"]
    found = {row["id"]: row for row in listed}
    assert list(found) == [other, stuck]
    assert "state cannot be read" in found[stuck]["problem"]
    assert (found[stuck]["phase"], found[stuck]["share"]) == ("running", 0)
    assert (found[other]["problem"], found[other]["share"]) == ("", 1000)
    shown = (await plane.admin.get(f"/v1/rollouts/{stuck}")).json()
    assert {name: shown[name] for name in found[stuck]} == found[stuck]
    assert (shown["plan"], shown["gates"], shown["verdict"]) == ({}, [], None)
    metrics = (await plane.admin.get("/metrics")).text
    assert 'control_plane_rollouts_count{phase="unreadable"} 1.0' in metrics


@pytest.mark.timeout(300)
async def test_embeddings_are_not_rolled_out(shared_control_plane) -> None:
    admin, put = shared_control_plane.admin, shared_control_plane.put
    base = "e1" * 32
    await put(f"bases/{base}", context_tokens_max=64)
    await put("pools/vectors", base_digest=base, engine="embed", replicas_wanted=0)
    for release in ("new", "old"):
        body = {"base_digest": base, "pool_id": "vectors", "release": release}
        await put("models/vectors", **body)
    body = {"model_id": "vectors", "release": "new"}
    refused = await admin.post("/v1/rollouts", json=body)
    assert refused.status_code == 422, refused.text
    assert refused.json()["code"] == "rollout_unsupported"
    assert "embeddings" in refused.json()["detail"]
    assert (await admin.get("/v1/rollouts?model_id=vectors")).json()["data"] == []
