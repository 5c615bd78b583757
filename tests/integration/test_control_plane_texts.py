"""Policies of texts on a real PostgreSQL, and who may read and erase what is kept."""

import asyncio
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from control_plane.telemetry_client import FeedDownError
from control_plane.texts.store import NO_TEXTS, open_store
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

TENANT = "texts-of"
POLICY = f"/v1/text-policies/{TENANT}"


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane) -> Any:
    await shared_control_plane.put("tiers/texts")
    for tenant in (TENANT, "texts-other"):
        await shared_control_plane.put(f"tenants/{tenant}", tier_id="texts")
    return shared_control_plane


async def test_a_policy_is_written_shown_and_removed(plane) -> None:
    made = await plane.admin.put(POLICY, json={"is_on": True, "redacted": ["email"]})
    assert made.status_code == 201, made.text
    body = made.json()
    assert (body["share_percent"], body["retention_days"]) == (100, 30)
    assert body["redacted"] == ["card", "email", "secret"]  # two of them always are
    tag = {"If-Match": made.headers["ETag"]}
    less = await plane.admin.put(POLICY, json={"is_on": True, "share_percent": 0.05}, headers=tag)
    assert less.status_code == 200
    assert len(less.json()["redacted"]) == 6
    assert (await plane.admin.put(POLICY, json={}, headers=tag)).status_code == 412
    query = {"kind": "text-policies", "object_id": TENANT}
    rows = (await plane.admin.get("/v1/audit", params=query)).json()["data"]
    assert [row["action"] for row in rows] == ["put", "replace", "create"]  # the last was refused
    assert (await plane.admin.delete(POLICY)).status_code == 204
    assert (await plane.admin.get(POLICY)).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"share_percent": 100.01},
        {"retention_days": 0},
        {"retention_days": 366},
        {"redacted": ["hair"]},
        {"words": ["ab"]},
        {"words": [" abc"]},
        {"words": [f"word{n}" for n in range(101)]},
    ],
)
async def test_invalid_policies_are_refused(plane, body: dict[str, Any]) -> None:
    answer = await plane.admin.put(POLICY, json=body)
    assert answer.status_code == 400, answer.text


async def test_only_tenants_have_policies(plane) -> None:
    answer = await plane.admin.put("/v1/text-policies/nobody", json={})
    assert answer.status_code == 400, answer.text


async def test_gateways_hear_of_a_policy(plane, eventually) -> None:
    await plane.admin.put(POLICY, json={"is_on": True, "words": ["falcon"]})
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "texts")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        known = lambda: watcher.state.text_policies.get(TENANT, wire.TextPolicy())  # noqa: E731
        # A snapshot may be of a moment ago, with another test's policy in it.
        await eventually(lambda: list(known().words) == ["falcon"], "the policy is known")
        policy = known()
        await plane.admin.delete(POLICY)
        await eventually(lambda: TENANT not in watcher.state.text_policies, "the policy is gone")
        running.cancel()
    assert (policy.is_on, policy.share, list(policy.words)) == (True, 10_000, ["falcon"])


class FakeTelemetry:
    """Has one text of each tenant."""

    def __init__(self) -> None:
        self.erased: list[str] = []

    async def find(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer telemetry-key"
        row = {"tenant_id": request.query["tenant"], "prompt": "{}"}
        is_there = request.match_info["id"] == "there"
        return web.json_response({"data": [row] if is_there else []})

    async def erase(self, request: web.Request) -> web.Response:
        self.erased.append(request.query["tenant"])
        return web.json_response({})


async def test_allowed_roles_read_and_erase_and_both_are_recorded(
    plane, start_control_plane, tmp_path
) -> None:
    fake, application = FakeTelemetry(), web.Application()
    application.router.add_get("/v1/texts/{id}", fake.find)
    application.router.add_delete("/v1/texts", fake.erase)
    texts, other = f"/v1/tenants/{TENANT}/texts", "/v1/tenants/texts-other/texts"
    async with TestServer(application) as server:
        environment = {
            "CONTROL_PLANE__TELEMETRY_URL": str(server.make_url("")),
            "CONTROL_PLANE__TELEMETRY_KEY": "telemetry-key",
        }
        url = plane.spec.env["CONTROL_PLANE__DATABASE_URL"]
        async with start_control_plane(url, tmp_path, **environment) as second:
            found = await second.admin.get(f"{texts}/there")
            assert found.json() == {"data": [{"tenant_id": TENANT, "prompt": "{}"}]}
            assert found.headers["Cache-Control"] == "no-store"
            assert (await second.admin.get(f"{texts}/gone")).status_code == 404
            for role, own, others in (
                ("viewer", 403, 403),
                ("operator", 403, 403),
                ("publisher", 200, 403),
            ):
                body = {"role": role} | ({"tenant_id": TENANT} if role == "publisher" else {})
                key = (await second.admin.post("/v1/admin-keys", json=body)).json()["key"]
                headers = {"Authorization": f"Bearer {key}"}
                statuses = [
                    (await second.admin.get(f"{path}/there", headers=headers)).status_code
                    for path in (texts, other)
                ]
                assert statuses == [own, others], role
                erase = await second.admin.delete(texts, headers=headers)
                assert erase.status_code == 403
            assert fake.erased == []
            assert (await second.admin.delete(texts)).status_code == 204
            assert fake.erased == [TENANT]
            query = {"kind": "texts"}
            rows = (await second.admin.get("/v1/audit", params=query)).json()["data"]
        rows = [row for row in rows if row["object_id"].startswith(TENANT)]  # the plane is shared
        told = [(it["action"], it["object_id"], it["actor_role"]) for it in rows]
        done = [it for it, row in zip(told, rows, strict=True) if row["outcome"] == "done"]
        assert done == [
            ("erase", TENANT, "admin"),
            ("read", f"{TENANT}/there", "publisher"),
            ("read", f"{TENANT}/there", "admin"),
        ]
        assert "prompt" not in str(rows)


async def test_without_telemetry_there_are_no_texts(plane, unused_tcp_port) -> None:
    assert (await plane.admin.get(f"/v1/tenants/{TENANT}/texts/r")).status_code == 503
    assert (await plane.admin.delete(f"/v1/tenants/{TENANT}/texts")).status_code == 503
    with pytest.raises(FeedDownError):
        await NO_TEXTS.find(TENANT, "r")
    async with open_store(f"http://127.0.0.1:{unused_tcp_port}", "key") as store:
        with pytest.raises(FeedDownError):
            await store.erase(TENANT)
