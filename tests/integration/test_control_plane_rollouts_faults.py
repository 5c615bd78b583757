"""What is wrong with one rollout does not hold up the others."""

import os
import signal
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
    running_telemetry,
    shown,
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
            await eventually(
                reaches(plane, other, share_percent=10), "another one goes on beside it"
            )

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
            over = reaches(plane, other, is_live=False, share_percent=0)
            await eventually(over, "what is not there any more is not waited for")

            for command in ("pause", "resume", "abort"):
                told = await plane.admin.post(f"/v1/rollouts/{stuck}/{command}")
                assert told.status_code == (200 if command == "abort" else 409), told.text
            assert told.json()["problem"] == "", "its state is one again"
            over = reaches(
                plane, stuck, phase="aborted", is_live=False, share_percent=0, problem=""
            )
            await eventually(over, "people can end what nobody can read")

            await database.execute("INSERT INTO rollout_plans (id, plan) VALUES ('stuck', '{}')")
            await database.execute("UPDATE rollout_plans SET plan = '{\"stages\": 5}'")
            path = "/v1/models/stuck/rollout-plan"
            assert (await plane.admin.get(path)).json()["plan"] == {"stages": 5}
            body = {"model_id": "stuck", "release": "old"}
            refused = await plane.admin.post("/v1/rollouts", json=body)
            assert (refused.status_code, refused.json()["param"]) == (409, "plan"), refused.text
            await plane.put(path.removeprefix("/v1/"), **LONG)
            assert (await plane.admin.delete(path)).status_code == 204
    finally:
        await database.close()


async def _is_shown(plane, stuck: str, other: str) -> None:
    """One that nobody can read is shown as that, and hides no other one."""
    listed = (await plane.admin.get("/v1/rollouts")).json()["data"]
    found = {row["id"]: row for row in listed}
    assert list(found) == [other, stuck]
    assert "state cannot be read" in found[stuck]["problem"]
    assert (found[stuck]["phase"], found[stuck]["share_percent"]) == ("running", 0)
    assert (found[other]["problem"], found[other]["share_percent"]) == ("", 10)
    shown = (await plane.admin.get(f"/v1/rollouts/{stuck}")).json()
    assert {name: shown[name] for name in found[stuck]} == found[stuck]
    assert (shown["plan"], shown["gates"], shown["verdict"]) == ({}, [], None)
    metrics = (await plane.admin.get("/metrics")).text
    assert 'control_plane_rollouts_count{phase="unreadable"} 1.0' in metrics


@pytest.mark.timeout(300)
async def test_telemetry_that_hangs_holds_its_rollouts_and_nothing_else(
    database_url: str, start_control_plane, tmp_path: Path, eventually
) -> None:
    async with (
        running_telemetry() as telemetry,
        start_control_plane(database_url, tmp_path, **telemetry.environment) as plane,
        running_gateway(plane.grpc_address),
    ):
        await make_fleet(plane)
        held, free = await _begin(plane, "held"), await _begin(plane, "free")
        for rollout in (held, free):
            await eventually(_has_sample(plane, rollout, 1), "evidence is counted")
        telemetry.hang(held)
        await eventually(lambda: telemetry.unanswered > 1, "it is asked, and does not answer")
        before = {rollout: await shown(plane, rollout) for rollout in (held, free)}
        more = _has_sample(plane, free, before[free]["sample"] + 1000)
        await eventually(more, "the other one goes on")
        found = await shown(plane, held)
        for name in ("phase", "stage", "share_percent", "sample", "watched_s", "is_live"):
            assert found[name] == before[held][name], name
        # Nobody answers for any of them: people still get answers, and are obeyed.
        telemetry.hang(free)
        for command, phase in (("pause", "paused"), ("resume", "running")):
            told = await plane.admin.post(f"/v1/rollouts/{held}/{command}")
            assert (told.status_code, told.json()["phase"]) == (200, phase)
        assert (await plane.admin.get("/readyz")).status_code == 200
        telemetry.answer()
        for rollout in (held, free):
            sample = (await shown(plane, rollout))["sample"]
            await eventually(_has_sample(plane, rollout, sample + 1), "it goes on by itself")
            found = await shown(plane, rollout)
            assert (found["phase"], found["share_percent"]) == ("running", 10)


def _has_sample(plane, rollout: str, least: int):
    async def check() -> bool:
        return (await shown(plane, rollout))["sample"] >= least

    return check


@pytest.mark.timeout(300)
async def test_a_frozen_stepper_is_replaced(
    database_url: str, start_control_plane, tmp_path: Path, eventually
) -> None:
    """It holds the row of its rollout in an open transaction, which somebody else ends."""
    database = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        async with (
            running_telemetry() as telemetry,
            start_control_plane(database_url, tmp_path, **telemetry.environment) as frozen,
        ):
            await make_fleet(frozen)
            rollout = await _begin(frozen, "m")
            await eventually(reaches(frozen, rollout, share_percent=10), "the first stage opens")
            session = await _freeze_in_a_step(database, frozen.child.pid, rollout, eventually)
            environment = telemetry.environment
            async with (
                start_control_plane(database_url, tmp_path, **environment) as other,
                running_gateway(other.grpc_address),
            ):

                async def is_ended() -> bool:
                    query = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1"
                    return await database.fetchval(query, session) == 0

                await eventually(is_ended, "the session of the frozen one is ended", 90)
                sample = (await shown(other, rollout))["sample"]
                await eventually(
                    _has_sample(other, rollout, sample + 1000), "the other one goes on", 90
                )
                assert (await shown(other, rollout))["share_percent"] == 10
                os.kill(frozen.child.pid, signal.SIGCONT)
                await eventually(frozen.is_ready, "it wakes up")
                aborted = await frozen.admin.post(f"/v1/rollouts/{rollout}/abort")
                assert aborted.status_code == 200, aborted.text
                over = reaches(other, rollout, phase="aborted", is_live=False)
                await eventually(over, "they work side by side")
    finally:
        await database.close()


_IN_A_STEP = """
SELECT waits.pid FROM pg_locks AS waits JOIN pg_locks AS held USING (pid)
WHERE waits.relation = 'releases'::regclass AND NOT waits.granted
AND held.relation = 'rollouts'::regclass AND held.mode = 'RowShareLock' AND held.granted
"""
_UNLOCKED = "SELECT id FROM rollouts WHERE id = $1 FOR UPDATE SKIP LOCKED"


async def _freeze_in_a_step(database, stepper: int, rollout: str, eventually) -> int:
    """Stop it while it reads releases, with its rollout locked; returns its session."""
    for _ in range(10):
        blocking = database.transaction()
        await blocking.start()
        await database.execute("SET LOCAL lock_timeout = '60s'")
        await database.execute("LOCK TABLE releases IN ACCESS EXCLUSIVE MODE")
        sessions: list[int] = []

        async def waits(found: list[int] = sessions) -> bool:
            session = await database.fetchval(_IN_A_STEP)
            found.extend([session] if session else [])
            return bool(found)

        await eventually(waits, "the stepper reads the releases")
        os.kill(stepper, signal.SIGSTOP)
        await blocking.rollback()
        # Its session waits for 4 s only: where this one stalls, the step was over before.
        if await database.fetchval(_UNLOCKED, rollout) is None:
            return sessions[0]
        os.kill(stepper, signal.SIGCONT)
    raise AssertionError("its step was over each time before it was stopped")


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
