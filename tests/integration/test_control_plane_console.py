"""The console's server side on a real PostgreSQL: sessions, what they may, files, feed."""

import asyncio
import json
import time

import httpx
import pytest
import pytest_asyncio

from sluice.ids import new_id
from sluice.limits import METERED_NAMES
from sluice.wire.state.v1 import state_pb2 as wire
from sluice.wire.state.v1.state_pb2_grpc import BatchServiceStub
from tests.links import trusted_channel

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

SESSION = "/console/session"


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane):
    await shared_control_plane.put("tiers/console")
    for tenant in ("console-a", "console-b"):
        await shared_control_plane.put(f"tenants/{tenant}", tier_id="console")
    return shared_control_plane


def browser(plane, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=plane.admin.base_url, headers=headers, timeout=60)


async def new_key(plane, **body: str) -> dict[str, str]:
    answer = await plane.admin.post("/v1/admin-keys", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def signed_in(plane, client: httpx.AsyncClient, key: str, name: str = "") -> dict:
    answer = await client.post(
        SESSION, headers={"authorization": f"Bearer {key}"}, json={"name": name}
    )
    assert answer.status_code == 201, answer.text
    client.headers["x-csrf-token"] = answer.json()["csrf"]
    return answer.json()


async def test_a_key_becomes_a_session_that_ends_with_it(plane) -> None:
    made = await new_key(plane, role="operator", name="Shared")
    async with browser(plane) as client, browser(plane) as other:
        assert (await client.get(SESSION)).json() == {"actor": None}
        assert (await client.get("/console/v1/tiers")).status_code == 401
        me = await signed_in(plane, client, made["key"], "Ada <b>")
        assert (me["actor"], me["role"], me["name"]) == (made["id"], "operator", "Ada <b>")
        assert me["limits"] == list(METERED_NAMES)
        assert (await client.get("/console/v1/tiers")).status_code == 200
        assert (await client.get(SESSION)).json() == me
        # Each sign-in has a cookie of its own; one that came with it is of no use any more.
        planted = client.cookies["sluice_console"]
        await signed_in(plane, client, made["key"])
        other.cookies.set("sluice_console", planted)
        assert (await other.get("/console/v1/tiers")).status_code == 401
        one = f"/v1/admin-keys/{made['id']}"
        await plane.admin.patch(one, json={"is_disabled": True})
        assert (await client.get("/console/v1/tiers")).status_code == 401
        await plane.admin.patch(one, json={"is_disabled": False})
        assert (await client.get("/console/v1/tiers")).status_code == 200
        await plane.admin.delete(one)
        assert (await client.get("/console/v1/tiers")).status_code == 401


async def test_the_cookie_is_for_no_script_and_no_other_site(plane) -> None:
    made = await new_key(plane, role="viewer")
    async with browser(plane, **{"x-forwarded-proto": "https"}) as client:
        headers = {"authorization": f"Bearer {made['key']}"}
        answer = await client.post(SESSION, headers=headers)
        cookie = answer.headers["set-cookie"]
        for part in ("HttpOnly", "SameSite=Strict", "Secure", "Max-Age=14400"):
            assert part in cookie
        # The folder of the request is its path then, whatever a proxy puts before it.
        assert "Path" not in cookie
        assert made["key"] not in answer.text + str(answer.headers)
        refused = await client.post(f"{SESSION}?key={made['key']}")
        assert refused.status_code == 400
        wrong = await client.post(SESSION, headers={"authorization": "Bearer sk-sluice-admin-x"})
        assert wrong.status_code == 401


async def test_writes_need_the_header_that_only_our_page_knows(plane) -> None:
    async with browser(plane) as client:
        me = await signed_in(plane, client, plane_key(plane), "Grace")
        assert me["role"] == "admin"
        body = {"tier_id": "console", "name": "<img src=x onerror=alert(1)>"}
        for header in ("", "0" * 64):
            client.headers["x-csrf-token"] = header
            answer = await client.put("/console/v1/tenants/console-c", json=body)
            assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")
        client.headers["x-csrf-token"] = me["csrf"]
        assert (await client.put("/console/v1/tenants/console-c", json=body)).status_code == 201
    query = {"object_id": "console-c", "kind": "tenants"}
    (row,) = (await plane.admin.get("/v1/audit", params=query)).json()["data"]
    assert (row["actor_id"], row["actor_name"], row["action"]) == ("bootstrap", "Grace", "create")


def plane_key(plane) -> str:
    return plane.admin.headers["authorization"].removeprefix("Bearer ")


async def test_sessions_end_when_their_holder_says_so(plane) -> None:
    made = await new_key(plane, role="viewer", name="Vera")
    async with browser(plane) as one, browser(plane) as two, browser(plane) as three:
        for client in (one, two, three):
            await signed_in(plane, client, made["key"])
        cookie = one.cookies["sluice_console"]
        assert (await one.delete(SESSION, headers={"x-csrf-token": ""})).status_code == 403
        assert (await one.delete(SESSION)).status_code == 204
        one.cookies.set("sluice_console", cookie)
        assert (await one.get(SESSION)).json() == {"actor": None}
        assert (await two.get("/console/v1/tiers")).status_code == 200
        assert (await two.delete("/console/sessions")).status_code == 204
        assert (await three.get("/console/v1/tiers")).status_code == 401
    rows = (await plane.admin.get("/v1/audit", params={"actor": made["id"]})).json()["data"]
    assert [row["action"] for row in rows] == ["revoke", "revoke", "create", "create", "create"]


async def test_a_publisher_sees_its_tenant_alone(plane) -> None:
    made = await new_key(plane, role="publisher", tenant_id="console-a")
    async with browser(plane) as client:
        await signed_in(plane, client, made["key"])
        assert (await client.get("/console/v1/tenants/console-b")).status_code == 404
        for path in ("requests", "requests/req_1", "usage"):
            told = await client.get(f"/console/data/{path}", params={"tenant": "console-b"})
            assert told.status_code == 404, path
            own = await client.get(f"/console/data/{path}")
            assert own.status_code == 503, path  # this control plane has no telemetry, and says so
            assert "CONTROL_PLANE__TELEMETRY_URL" in own.json()["detail"]
        for path in ("overview", "live", "costs"):
            assert (await client.get(f"/console/data/{path}")).status_code == 403, path


async def test_a_reader_sees_usage_and_requests_of_its_tenant_alone(plane) -> None:
    refused = await plane.admin.post("/v1/admin-keys", json={"role": "reader"})
    assert refused.status_code == 400
    made = await new_key(plane, role="reader", tenant_id="console-a")
    for tenant in ("console-a", "console-b"):
        await plane.put(f"tenants/{tenant}/budgets/day", amount=1000, period="day")
    key = {"authorization": f"Bearer {made['key']}"}
    async with browser(plane) as client, browser(plane, **key) as rest:
        me = await signed_in(plane, client, made["key"])
        assert (me["role"], me["tenant_id"]) == ("reader", "console-a")
        for asking, below in ((client, "/console/v1"), (rest, "/v1")):
            for path in ("requests", "requests/req_1", "usage", "batches"):
                other = {"tenant": "console-b"}
                told = await asking.get(f"/console/data/{path}", params=other)
                assert told.status_code == 404, path
                own = await asking.get(f"/console/data/{path}")
                assert own.status_code == (200 if path == "batches" else 503), path
            seen = (await asking.get(f"{below}/budgets")).json()["data"]
            assert {it["tenant_id"] for it in seen} == {"console-a"}
            other = await asking.get(f"{below}/tenants/console-b/budgets/day")
            assert other.status_code == 404
            for path in ("tenants/console-a", "models", "tiers", "alerts", "admin-keys", "bases"):
                assert (await asking.get(f"{below}/{path}")).status_code == 403, path
            for path in ("overview", "live", "costs"):
                assert (await asking.get(f"/console/data/{path}")).status_code == 403, path


async def test_batches_are_shown_to_their_tenant_and_to_operators(plane) -> None:
    ids: dict[str, str] = {}
    now_ms = time.time_ns() // 1_000_000
    async with trusted_channel(plane.grpc_address) as channel:
        for tenant in ("console-a", "console-b"):
            batch = wire.Batch(
                id=new_id("batch"),
                tenant_id=tenant,
                key_id="key_console",
                endpoint="/v1/completions",
                input_file_id="file-none",
                created_at_unix_ms=now_ms,
                expires_at_unix_ms=now_ms + 3_600_000,
            )
            ids[tenant] = (await BatchServiceStub(channel).Begin(batch, timeout=30)).id
    made = await new_key(plane, role="publisher", tenant_id="console-a")
    path = "/console/data/batches"
    async with browser(plane) as client:
        await signed_in(plane, client, made["key"])
        own = (await client.get(path)).json()["data"]
        assert {it["tenant_id"] for it in own} == {"console-a"}
        assert (await client.get(path, params={"tenant": "console-b"})).status_code == 404
        assert (await client.get(f"{path}/{ids['console-b']}")).status_code == 404
        shown = (await client.get(f"{path}/{ids['console-a']}")).json()
        assert (shown["endpoint"], shown["key_id"]) == ("/v1/completions", "key_console")
    every = (await plane.admin.get(path, params={"limit": 1})).json()
    assert every["has_more"]
    (newest,) = every["data"]
    older = await plane.admin.get(path, params={"before": newest["number"], "tenant": "console-a"})
    assert ids["console-a"] in {it["id"] for it in older.json()["data"]}
    assert (await plane.admin.get(path, params={"before": "x"})).status_code == 400
    assert (await plane.admin.get(path, params={"status": "completed"})).json()["data"] == []


async def test_the_playground_takes_a_tenants_key_and_names_its_missing_scopes(plane) -> None:
    made = await new_key(plane, role="viewer")
    async with browser(plane) as client:
        play = "/console/data/play/chat/completions"
        assert (await client.post(play, json={})).status_code == 401
        me = await signed_in(plane, client, made["key"])
        for key, told in (
            ("", "has none of its own"),
            (made["key"], "an admin key"),
            ("sk-sluice-x", "GATEWAY_URL"),
        ):
            answer = await client.post(play, json={}, headers={"x-sluice-key": key})
            assert answer.status_code == (503 if key == "sk-sluice-x" else 400)
            assert told in answer.json()["detail"]
        client.headers["x-csrf-token"] = me["csrf"][::-1]
        refused = await client.post(play, json={}, headers={"x-sluice-key": "sk-sluice-x"})
        assert refused.status_code == 403
        client.headers["x-csrf-token"] = me["csrf"]
        elsewhere = await client.post("/console/data/play/admin", json={})
        assert elsewhere.status_code == 405


async def test_the_overview_tells_which_numbers_are_missing(plane) -> None:
    found = (await plane.admin.get("/console/data/overview")).json()
    assert found["slo"] is None
    assert "CONTROL_PLANE__TELEMETRY_URL" in found["missing"]
    assert found["counts"]["tenants"] >= 2
    assert (await plane.admin.get("/console/data/overview?tenant=x")).status_code == 400


async def test_files_come_with_a_policy_and_nothing_else_comes(plane) -> None:
    async with browser(plane) as client:
        entered = await client.get("/console")
        assert (entered.status_code, entered.headers["location"]) == (308, "console/")
        page = await client.get("/console/")
        policy = page.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        again = await client.get("/console/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        script = await client.get("/console/main.js")
        assert script.headers["content-type"].startswith("text/javascript")
        assert script.headers["content-encoding"] == "gzip"
        for path in (
            "%2e%2e/pyproject.toml",
            "vendor/README.md",
            "nothing.js",
        ):
            assert (await client.get(f"/console/{path}")).status_code == 404, path


async def test_the_feed_tells_the_whole_state_and_each_newer_one(plane) -> None:
    async with browser(plane) as client:
        await signed_in(plane, client, plane_key(plane))
        async with client.stream("GET", "/console/data/live") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            states = states_of(answer)
            before = await anext(states)
            await plane.put("tenants/console-live", tier_id="console")
            async with asyncio.timeout(60):
                while (await anext(states))["counts"]["tenants"] == before["counts"]["tenants"]:
                    pass
        async with client.stream("GET", "/console/data/live") as answer:
            first = await anext(states_of(answer))
            assert first["counts"]["tenants"] > before["counts"]["tenants"]


async def states_of(answer: httpx.Response):
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
