"""Rollouts on real control planes: promoted, sent back, killed, two at once, and by hand."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import pytest
from sqlalchemy import make_url
from typer.testing import CliRunner

from cli.app import app
from sluice.wire.agent.v1 import agent_pb2 as wire
from sluice.wire.agent.v1.agent_pb2_grpc import AgentServiceStub
from sluice.wire.control.v1.control_pb2 import REPLICA_STATE_READY
from tests.integration.conftest import ADMIN_KEY
from tests.integration.rollout_site import (
    LONG,
    SHORT,
    Telemetry,
    begin,
    make_fleet,
    make_model,
    reaches,
    running_gateway,
    running_telemetry,
    shown,
)
from tests.links import trusted_channel

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
]

DEADLINE_S = 90.0


@asynccontextmanager
async def site(start_control_plane, url, directory) -> AsyncIterator[tuple[Any, Telemetry]]:
    async with (
        running_telemetry() as telemetry,
        start_control_plane(url, directory, **telemetry.environment) as plane,
    ):
        await make_fleet(plane)
        yield plane, telemetry


async def test_a_good_release_takes_over(
    database_url, tmp_path, start_control_plane, eventually
) -> None:
    async with (
        site(start_control_plane, database_url, tmp_path) as (plane, _),
        running_gateway(plane.grpc_address) as gateway,
    ):
        await make_model(plane, "m")
        plan = await plane.put("models/m/rollout-plan", **SHORT)
        assert (plan["is_default"], len(plan["plan"]["gates"])) == (False, 14)
        prompt = {"token_ids": [1, 2], "expected_token_ids": [3]}
        asked = await plane.admin.post("/v1/models/m/golden-prompts", json=prompt)
        assert asked.status_code == 201, asked.text
        rollout = await begin(plane, "m")
        old = {"base_digest": "d1" * 32, "pool_id": "main", "adapter_digest": "d3" * 32}
        for refused in (
            await plane.admin.put("/v1/models/m", json=old),
            await plane.admin.delete("/v1/models/m"),
            await plane.admin.delete("/v1/releases/m@new"),
            await plane.admin.post("/v1/rollouts", json={"model_id": "m", "release": "new"}),
        ):
            assert refused.status_code == 409, refused.text
            assert rollout in refused.json()["detail"]

        async def is_unasked() -> bool:
            waits = (await shown(plane, rollout))["waiting_for"]
            return waits.startswith("20 answers of each release to golden prompts (none yet: ")

        await eventually(is_unasked, "no agent asks its prompt", timeout_s=DEADLINE_S)
        gone = await plane.admin.delete(f"/v1/golden-prompts/{asked.json()['id']}")
        assert gone.status_code == 204, gone.text
        over = reaches(plane, rollout, phase="done", is_live=False)
        await eventually(over, "it takes over", timeout_s=DEADLINE_S)
        # A snapshot, after a lost connection, says again what was said.
        told = [share for share, _ in groupby(gateway.shares) if share]
        assert told == [1000, 10000]
        await eventually(lambda: not gateway.splits, "the split goes")
        assert gateway.watcher.state.models["m"].release == "new"
        assert gateway.watcher.state.models["m"].adapter_digest == "d2" * 32
        path = f"/v1/rollouts/{rollout}/events"
        events = (await plane.admin.get(path)).json()["data"]
        stages = [event["stage"] for event in events if event["phase"] == "running"]
        assert sorted(set(stages)) == [-1, 0, 1], "none is left out"
        assert (events[-1]["event"], events[-1]["phase"]) == ("settled", "done")
        back = await plane.admin.post("/v1/models/m/rollback", json={"release": "never"})
        assert back.status_code == 404, back.text
        back = await plane.admin.post("/v1/models/m/rollback")
        told = {"id": "m", "release": "old", "previous_release": "new", "aborted_rollout_id": ""}
        assert (back.status_code, back.json()) == (200, told)
        found = (await plane.admin.get("/v1/models/m")).json()
        assert (found["adapter_digest"], found["previous_release"]) == ("d3" * 32, "new")
        await eventually(
            lambda: gateway.watcher.state.models["m"].release == "old", "gateways follow"
        )
        assert (await plane.admin.put("/v1/models/m", json=old)).status_code == 200


async def test_a_release_that_a_node_cannot_load_never_gets_a_share(
    database_url, tmp_path, start_control_plane, eventually, postgres_server
) -> None:
    """An agent is told to try it before there is a share, and its result decides."""
    async with (
        site(start_control_plane, database_url, tmp_path) as (plane, _),
        running_gateway(plane.grpc_address) as gateway,
        trusted_channel(plane.grpc_address) as channel,
    ):
        database = make_url(database_url).database
        disabled = "ALTER TABLE rollouts DISABLE TRIGGER tried"
        await postgres_server.execute(disabled, database)
        for model in ("good", "bad"):
            await make_model(plane, model)
        good, bad = [await begin(plane, model, plan=SHORT) for model in ("good", "bad")]
        waits = "one of which has tried its adapter"

        async def is_waiting() -> bool:
            return waits in (await shown(plane, good))["waiting_for"]

        await eventually(is_waiting, "it waits for a trial")
        call = AgentServiceStub(channel).Sync()
        replica = wire.ObservedReplica(replica_id="replica", state=REPLICA_STATE_READY)
        report = wire.SyncRequest(node_id="node", replicas=[replica])
        await call.write(report)
        while len(wanted := (await call.read()).trials) < 2:
            pass
        assert {it.rollout_id for it in wanted} == {good, bad}
        assert {(it.pool_id, it.adapter_digest) for it in wanted} == {("main", "d2" * 32)}
        report.trial_results.add(rollout_id=good)
        report.trial_results.add(rollout_id=bad, code="adapter_invalid", message="r is 32")
        await call.write(report)
        await eventually(reaches(plane, bad, phase="aborted", is_live=False), "one is aborted")
        found = await shown(plane, bad)
        assert (found["reason"], found["stage"], found["share_percent"]) == ("not_loaded", -1, 0)
        told = {"node_id": "node", "code": "adapter_invalid", "message": "r is 32"}
        assert found["trials"] == [told]
        assert gateway.watcher.state.models["bad"].release == "old"
        await eventually(
            reaches(plane, good, stage=0), "the other one begins", timeout_s=DEADLINE_S
        )
        assert (await shown(plane, good))["trials"] == [told | {"code": "", "message": ""}]
        call.cancel()


async def test_it_goes_on_where_another_was_killed_and_is_sent_back(
    database_url, tmp_path, start_control_plane, eventually
) -> None:
    async with (
        site(start_control_plane, database_url, tmp_path) as (plane, telemetry),
        start_control_plane(database_url, tmp_path, **telemetry.environment) as other,
        running_gateway(other.grpc_address) as gateway,
    ):
        await make_model(plane, "m")
        rollout = await begin(plane, "m", plan=LONG)
        await eventually(reaches(other, rollout, share_percent=10), "the first stage opens")
        before = await shown(other, rollout)
        os.kill(plane.child.pid, signal.SIGKILL)

        async def is_watched() -> bool:
            found = await shown(other, rollout)
            return found["watched_s"] >= before["watched_s"] + 3

        await eventually(is_watched, "the other one goes on", timeout_s=DEADLINE_S)
        found = await shown(other, rollout)
        assert (found["phase"], found["stage"], found["share_percent"]) == ("running", 0, 10)
        assert found["sample"] > 0
        telemetry.is_bad = True
        back = reaches(other, rollout, phase="rolled_back", is_live=False)
        await eventually(back, "it is sent back", timeout_s=DEADLINE_S)
        found = await shown(other, rollout)
        assert (found["reason"], found["verdict"]["metric"]) == ("worse", "errors")
        assert found["verdict"]["suspect"]["bad"] >= 100
        assert found["explanation"].startswith("errors in stage 0: ")
        await eventually(lambda: not gateway.splits, "the split goes")
        assert gateway.shares[-1] == 0, "everybody was sent back before"
        assert gateway.watcher.state.models["m"].release == "old"
        events = (await other.admin.get(f"/v1/rollouts/{rollout}/events")).json()["data"]
        halted = next(event for event in events if event["phase"] == "halted")
        assert halted["verdict"] == found["verdict"]
        metrics = (await other.admin.get("/metrics")).text
        assert 'control_plane_rollbacks_total{cause="errors"} 1.0' in metrics


async def test_people_hold_it_and_end_it(
    database_url, tmp_path, start_control_plane, eventually, monkeypatch
) -> None:
    async with (
        site(start_control_plane, database_url, tmp_path) as (plane, _),
        running_gateway(plane.grpc_address),
    ):
        await make_model(plane, "m")
        monkeypatch.setenv("SLUICE_ADMIN_URL", str(plane.admin.base_url))
        monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)

        async def sluice(*words: str, status: int = 0) -> str:
            done = await asyncio.to_thread(CliRunner().invoke, app, ["rollouts", *words])
            assert done.exit_code == status, (words, done.output)
            return done.output

        (tmp_path / "plan.json").write_text(json.dumps(LONG))
        words = ("start", "m", "new", "--plan", str(tmp_path / "plan.json"), "--later", "--json")
        rollout = json.loads(await sluice(*words))["id"]
        assert "planned" in await sluice("show", rollout)
        await sluice("launch", rollout)
        await eventually(reaches(plane, rollout, share_percent=10), "the first stage opens")
        operator = await plane.admin.post("/v1/admin-keys", json={"role": "operator"})
        as_operator = {"Authorization": f"Bearer {operator.json()['key']}"}
        path = f"/v1/rollouts/{rollout}"
        held = await plane.admin.post(f"{path}/pause", headers=as_operator)
        assert (held.status_code, held.json()["phase"]) == (200, "paused")
        assert held.json()["reason"] == "by_hand"
        promoted = await plane.admin.post(f"{path}/promote", json={"stage": 0}, headers=as_operator)
        assert promoted.status_code == 403
        stale = await plane.admin.post(f"{path}/resume", headers={"If-Match": '"0"'})
        assert stale.status_code == 412
        assert "running" in await sluice("resume", rollout)
        assert "cannot do this: resume" in await sluice("resume", rollout, status=1)
        assert "not the present" in await sluice("promote", rollout, "--stage", "1", status=1)
        await sluice("promote", rollout)
        await eventually(reaches(plane, rollout, share_percent=100), "the last stage opens")
        assert rollout in await sluice("list", "--model", "m", "--phase", "running")
        assert rollout in await sluice("show", "m")
        assert "aborted" in await sluice("abort", "m")
        assert "aborted" in await sluice("watch", "m", status=1)
        assert "has no rollout" in await sluice("show", "other", status=1)
        over = reaches(plane, rollout, is_live=False, share_percent=0)
        await eventually(over, "nothing is left of it")
        assert (await plane.admin.get("/v1/models/m")).json()["release"] == "old"
        assert "bootstrap" in await sluice("events", rollout)
        audit = (await plane.admin.get(f"/v1/audit?object_id={rollout}")).json()["data"]
        assert {"create", "start", "pause", "resume", "promote", "abort"} <= {
            row["action"] for row in audit if row["outcome"] == "done"
        }
        again = json.loads(await sluice("start", "m", "new", "--json"))["id"]
        done = await asyncio.to_thread(CliRunner().invoke, app, ["rollback", "m"])
        assert (done.exit_code, f"rollout {again} is aborted" in done.output) == (0, True)
        assert (await shown(plane, again))["phase"] == "aborted"
        assert "100" in await sluice("plan", "m")
        (tmp_path / "plan.json").write_text('{"stages": [{"share_percent": 0.05}]}')
        words = ("plan", "m", "--set", str(tmp_path / "plan.json"))
        assert "must have all of the traffic" in await sluice(*words, status=1)
