"""Admin keys with roles on a real PostgreSQL: who gets in, and what they may do there."""

import asyncio
import hashlib
import re

import asyncpg
import httpx
import pytest
import pytest_asyncio

from tests.integration.admin_description import HOOKS

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

BASE = "ac" * 32
KEYS = "/v1/admin-keys"


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane):
    put = shared_control_plane.put
    await put("tiers/access")
    for tenant in ("access-a", "access-b"):
        await put(f"tenants/{tenant}", tier_id="access")
    await put(f"bases/{BASE}", context_tokens_max=64)
    await put("pools/access", base_digest=BASE, engine="sim", replicas_wanted=0)
    return shared_control_plane


async def make(plane, **body: object) -> dict[str, object]:
    answer = await plane.admin.post(KEYS, json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def client(plane, key: object) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(
        base_url=plane.admin.base_url, headers=headers, timeout=60, event_hooks=HOOKS
    )


async def status_of(plane, key: object) -> int:
    async with client(plane, key) as holder:
        return (await holder.get("/v1/tiers")).status_code


async def described(plane) -> list[tuple[str, str, str]]:
    """Return method, a path with ids that are nobody's, and action of all that there is."""
    paths = (await plane.admin.get("/openapi.json")).json()["paths"]
    return [
        (method.upper(), re.sub("{[a-z_]+}", "nobody", path), operation["x-sluice-action"])
        for path, operations in paths.items()
        for method, operation in operations.items()
        if method != "parameters"
    ]


async def test_a_key_is_made_changed_rotated_and_revoked(plane) -> None:
    answer = await plane.admin.post(KEYS, json={"role": "viewer", "name": "Vera"})
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    made = answer.json()
    assert made["key"].startswith("sk-sluice-admin-")
    one = f"{KEYS}/{made['id']}"
    found = (await plane.admin.get(one)).json()
    assert found == {name: value for name, value in made.items() if name != "key"}
    assert (found["name"], found["role"], found["tenant_id"]) == ("Vera", "viewer", "")
    assert found in (await plane.admin.get(KEYS)).json()["data"]
    assert await status_of(plane, made["key"]) == 200
    assert (await plane.admin.patch(one, json={"is_disabled": True})).json()["is_disabled"]
    assert await status_of(plane, made["key"]) == 401
    assert (await plane.admin.post(f"{one}/rotate")).status_code == 409
    await plane.admin.patch(one, json={"is_disabled": False})
    new = (await plane.admin.post(f"{one}/rotate", json={"grace_s": 3600})).json()
    assert (new["role"], new["name"], new["replaces"]["id"]) == ("viewer", "Vera", made["id"])
    assert [await status_of(plane, key["key"]) for key in (made, new)] == [200, 200]
    newer = (await plane.admin.post(f"{KEYS}/{new['id']}/rotate", json={"grace_s": 0})).json()
    assert await status_of(plane, newer["key"]) == 200
    await asyncio.sleep(0.005)
    assert await status_of(plane, new["key"]) == 401
    assert (await plane.admin.delete(one)).status_code == 204
    assert await status_of(plane, made["key"]) == 401
    assert (await plane.admin.delete(one)).status_code == 404


async def test_only_the_hash_of_a_key_is_kept(plane) -> None:
    made = await make(plane, role="operator")
    url = plane.spec.env["CONTROL_PLANE__DATABASE_URL"].replace("+asyncpg", "")
    connection = await asyncpg.connect(url)
    try:
        row = await connection.fetchrow("SELECT * FROM admin_keys WHERE id = $1", made["id"])
    finally:
        await connection.close()
    assert row["secret_sha256"] == hashlib.sha256(str(made["key"]).encode()).digest()
    assert str(made["key"]) not in str(dict(row))
    assert str(made["key"]) not in plane.spec.log_file.read_text()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "role"),
        ({"role": "king"}, "role"),
        ({"role": "publisher"}, None),
        ({"role": "admin", "tenant_id": "access-a"}, None),
        ({"role": "publisher", "tenant_id": "access-none"}, "tenant_id"),
        ({"role": "viewer", "expires_at_unix_ms": -1}, "expires_at_unix_ms"),
        ({"role": "viewer", "name": "a\u0000"}, "name"),
    ],
)
async def test_an_invalid_admin_key_is_refused(
    plane, body: dict[str, object], param: str | None
) -> None:
    answer = await plane.admin.post(KEYS, json=body)
    assert (answer.status_code, answer.json().get("param")) == (400, param), answer.text


async def test_a_publisher_of_a_disabled_tenant_is_kept_out(plane) -> None:
    await plane.put("tenants/access-off", tier_id="access")
    key = await make(plane, role="publisher", tenant_id="access-off")
    async with client(plane, key["key"]) as holder:
        assert (await holder.get("/v1/models")).status_code == 200
        await plane.put("tenants/access-off", tier_id="access", is_disabled=True)
        assert (await holder.get("/v1/models")).status_code == 401
        assert (await plane.admin.delete("/v1/tenants/access-off")).status_code == 204
        assert (await holder.get("/v1/models")).status_code == 401
    assert (await plane.admin.get(f"{KEYS}/{key['id']}")).status_code == 404


async def test_a_stranger_gets_nowhere(plane) -> None:
    async with client(plane, "sk-sluice-admin-guessed") as stranger:
        for method, path, _ in await described(plane):
            answer = await stranger.request(method, path, content=b"{}")
            assert answer.status_code == 401, (method, path)


async def test_a_role_is_for_good(plane) -> None:
    made = await make(plane, role="viewer")
    answer = await plane.admin.patch(f"{KEYS}/{made['id']}", json={"role": "admin"})
    assert (answer.status_code, answer.json()["param"]) == (400, "role")


async def test_a_key_that_expired_is_unknown(plane) -> None:
    assert (
        await status_of(plane, (await make(plane, role="admin", expires_at_unix_ms=1))["key"])
        == 401
    )
    assert await status_of(plane, (await make(plane, role="admin"))["key"]) == 200


async def test_viewers_and_operators_are_told_which_role_it_takes(plane) -> None:
    routes = await described(plane)
    for role, writable in (("viewer", ()), ("operator", ("write_fleet", "control_rollouts"))):
        key = await make(plane, role=role)
        async with client(plane, key["key"]) as holder:
            for method, path, action in routes:
                answer = await holder.request(method, path, content=b"[]")
                is_read = action.startswith("read_") and action != "read_text_policies"
                if is_read or action in writable:
                    # 503: this control plane has no store of artifacts to sweep.
                    allowed = {503} if path.endswith("/sweeps") else {200, 400, 404}
                    assert answer.status_code in allowed, (method, path)
                    continue
                assert answer.status_code == 403, (role, method, path)
                problem = answer.json()
                assert problem["code"] == "permission_denied"
                assert "admin" in problem["detail"], problem
                assert (
                    f"your key is a{'n' if role == 'operator' else ''} {role}" in problem["detail"]
                )


async def test_an_operator_runs_the_fleet(plane) -> None:
    key = await make(plane, role="operator")
    async with client(plane, key["key"]) as holder:
        body = {"base_digest": BASE, "engine": "sim", "replicas_wanted": 0}
        assert (await holder.put("/v1/pools/access-op", json=body)).status_code == 201
        assert (await holder.delete("/v1/pools/access-op")).status_code == 204
        assert (await holder.put("/v1/tiers/access-op", json={})).status_code == 403


async def test_a_publisher_has_its_tenants_models_and_sees_no_others(plane) -> None:
    model = {"base_digest": BASE, "pool_id": "access", "release": "1"}
    await plane.put("models/access-b/secret", **model, owner_tenant_id="access-b")
    await plane.put("models/access-public", **model)
    await plane.put("models/access-given", **model, owner_tenant_id="access-a")
    key = await make(plane, role="publisher", tenant_id="access-a")
    own = model | {"owner_tenant_id": "access-a"}
    async with client(plane, key["key"]) as holder:
        for method, path, body, status in (
            ("PUT", "models/access-a/m", own, 201),
            ("PUT", "models/access-a/m", own | {"release": "2"}, 200),
            ("PUT", "models/access-given", own, 200),
            ("DELETE", "releases/access-a/m@1", None, 204),
            ("PUT", "aliases/access-a/best", {"target": "access-a/m", "owner_tenant_id": "access-a"}, 201),
            ("PUT", "aliases/access-a/pub", {"target": "access-public", "owner_tenant_id": "access-a"}, 201),
            # Not its own, whether there is such a thing or not.
            ("PUT", "models/access-a/n", model, 403),
            ("PUT", "models/access-a/n", own | {"owner_tenant_id": "access-b"}, 403),
            ("PUT", "models/access-b/secret", own, 403),
            ("PUT", "models/access-public", own, 403),
            ("PUT", "models/squat", own, 403),
            ("PUT", "aliases/squat", {"target": "access-a/m", "owner_tenant_id": "access-a"}, 403),
            ("PUT", "aliases/access-a/x", {"target": "access-b/secret", "owner_tenant_id": "access-a"}, 400),
            ("DELETE", "models/access-public", None, 403),
            ("DELETE", "models/access-b/secret", None, 404),
            ("DELETE", "releases/access-b/secret@1", None, 404),
            ("DELETE", "models/none", None, 404),
            ("PUT", f"bases/{BASE}", {"context_tokens_max": 64}, 403),
            ("PUT", "pools/access", {}, 403),
            ("POST", "tenants/access-a/keys", {}, 403),
            ("GET", "models/access-a/m", None, 200),
            ("GET", "models/access-public", None, 200),
            ("GET", "models/access-b/secret", None, 404),
            ("GET", "releases/access-b/secret@1", None, 404),
            ("GET", "tenants/access-a", None, 200),
            ("GET", "tenants/access-b", None, 404),
            ("GET", "tenants/access-a/keys", None, 200),
            ("GET", "tenants/access-b/keys", None, 403),
            ("GET", "tenants/nobody/keys", None, 403),
            ("GET", f"bases/{BASE}", None, 200),
            ("GET", "pools", None, 200),
            ("GET", "nodes", None, 403),
            ("GET", "tiers", None, 403),
            ("GET", "audit", None, 403),
            ("GET", "admin-keys", None, 403),
        ):  # fmt: skip
            answer = await holder.request(method, f"/v1/{path}", json=body)
            assert answer.status_code == status, (method, path, answer.text)
        for kind in ("models", "aliases", "releases"):
            listed = (await holder.get(f"/v1/{kind}")).json()["data"]
            assert listed, kind
            assert "access-b" not in str(listed)
        tenants = (await holder.get("/v1/tenants")).json()["data"]
        assert [tenant["id"] for tenant in tenants] == ["access-a"]


async def test_a_foreign_name_and_an_unknown_one_get_the_same_answer(plane) -> None:
    model = {"base_digest": BASE, "pool_id": "access", "release": "1"}
    await plane.put("models/access-hidden", **model, owner_tenant_id="access-b")
    key = await make(plane, role="publisher", tenant_id="access-a")
    async with client(plane, key["key"]) as holder:
        for method in ("GET", "PUT", "DELETE"):
            answers = [
                await holder.request(
                    method, f"/v1/models/{name}", json=model | {"owner_tenant_id": "access-a"}
                )
                for name in ("access-hidden", "access-absent")
            ]
            assert answers[0].status_code == answers[1].status_code
            hidden, absent = (answer.json()["detail"] for answer in answers)
            assert hidden.replace("hidden", "absent") == absent


async def test_the_key_of_the_settings_is_always_there(plane) -> None:
    key = await make(plane, role="admin")
    async with client(plane, key["key"]) as holder:
        for known in (await holder.get(KEYS)).json()["data"]:
            assert (await holder.delete(f"{KEYS}/{known['id']}")).status_code == 204
        assert (await holder.get(KEYS)).status_code == 401
    assert (await plane.admin.get(KEYS)).json()["data"] == []


async def test_head_accepts_the_requests_of_get(plane) -> None:
    key = await make(plane, role="publisher", tenant_id="access-a")
    async with client(plane, key["key"]) as holder:
        for path, status in (("models", 200), ("tiers", 403), ("tiers/x", 403), ("none", 404)):
            answer = await holder.head(f"/v1/{path}")
            assert (answer.status_code, answer.content) == (status, b"")
    async with httpx.AsyncClient(base_url=plane.admin.base_url) as stranger:
        assert (await stranger.head("/healthz")).status_code == 200
        assert (await stranger.head("/v1/tiers")).status_code == 401
