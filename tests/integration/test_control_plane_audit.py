"""The audit log on a real PostgreSQL: a row for every write, and for every refused one."""

import re

import asyncpg
import pytest
import pytest_asyncio

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

BASE = "ad" * 32
MODEL = {"base_digest": BASE, "pool_id": "audit", "release": "1"}
POOL = {"base_digest": BASE, "engine": "sim", "replicas_wanted": 0}
# Method, path, body, and what is recorded: verb, kind. In this order; `{}` is the id made before.
WRITES = [
    ("PUT", "/v1/tiers/audit-t", {"rpm": 1}, "create", "tiers"),
    ("PUT", "/v1/tiers/audit-t", {"rpm": 2}, "replace", "tiers"),
    ("DELETE", "/v1/tiers/audit-t", None, "delete", "tiers"),
    ("PUT", "/v1/tenants/audit-x", {"tier_id": "audit"}, "create", "tenants"),
    ("DELETE", "/v1/tenants/audit-x", None, "delete", "tenants"),
    ("POST", "/v1/tenants/audit/keys", {}, "create", "keys"),
    ("PATCH", "/v1/tenants/audit/keys/{}", {"rpm": 1}, "change", "keys"),
    ("POST", "/v1/tenants/audit/keys/{}/rotate", {}, "rotate", "keys"),
    ("DELETE", "/v1/tenants/audit/keys/{}", None, "revoke", "keys"),
    ("POST", "/v1/admin-keys", {"role": "viewer"}, "create", "admin-keys"),
    ("PATCH", "/v1/admin-keys/{}", {"name": "x"}, "change", "admin-keys"),
    ("POST", "/v1/admin-keys/{}/rotate", {}, "rotate", "admin-keys"),
    ("DELETE", "/v1/admin-keys/{}", None, "revoke", "admin-keys"),
    ("PUT", f"/v1/bases/{BASE[:-2]}00", {"context_tokens_max": 1}, "create", "bases"),
    ("DELETE", f"/v1/bases/{BASE[:-2]}00", None, "delete", "bases"),
    ("PUT", "/v1/pools/audit-p", POOL, "create", "pools"),
    ("DELETE", "/v1/pools/audit-p", None, "delete", "pools"),
    ("PUT", "/v1/models/audit-m", MODEL, "create", "models"),
    ("PUT", "/v1/models/audit-m", MODEL | {"release": "2"}, "replace", "models"),
    ("POST", "/v1/models/audit-m/rollback", {}, "rollback", "models"),
    ("DELETE", "/v1/releases/audit-m@2", None, "delete", "releases"),
    ("PUT", "/v1/aliases/audit-a", {"target": "audit-m"}, "create", "aliases"),
    ("DELETE", "/v1/aliases/audit-a", None, "delete", "aliases"),
    ("DELETE", "/v1/models/audit-m", None, "delete", "models"),
]
KINDS = {kind for *_, kind in WRITES}  # other domains test theirs


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane):
    put = shared_control_plane.put
    await put("tiers/audit")
    await put("tenants/audit", tier_id="audit")
    await put(f"bases/{BASE}", context_tokens_max=64)
    await put("pools/audit", **POOL)
    return shared_control_plane


async def recorded(plane, request_id: str) -> list[dict[str, object]]:
    """Return the rows of a request, oldest first."""
    newest = (await plane.admin.get("/v1/audit?limit=50")).json()["data"]
    return [row for row in reversed(newest) if row["request_id"] == request_id]


async def write_routes(plane) -> list[tuple[str, str, str]]:
    """Return method, path and kind of all routes that write."""
    paths = (await plane.admin.get("/openapi.json")).json()["paths"]
    return [
        (method.upper(), path, operation["tags"][0])
        for path, operations in paths.items()
        for method, operation in operations.items()
        if method in {"put", "post", "patch", "delete"}
    ]


def is_of(path: str, pattern: str) -> bool:
    return re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(pattern)), path) is not None


async def test_every_write_leaves_a_row(plane) -> None:
    wanted = {(method, path) for method, path, kind in await write_routes(plane) if kind in KINDS}
    covered = {
        (method, path)
        for method, path in wanted
        if any(method == of and is_of(tried, path) for of, tried, *_ in WRITES)
    }
    assert covered == wanted, "a write that this test does not make"
    made, before = "", {}
    for number, (method, pattern, body, verb, kind) in enumerate(WRITES):
        path, request_id = pattern.format(made), f"audit-write-{number}"
        headers = {"x-request-id": request_id, "Idempotency-Key": request_id}
        answer = await plane.admin.request(method, path, json=body, headers=headers)
        assert answer.is_success, answer.text
        assert answer.headers["x-request-id"] == request_id
        shown = answer.json() if answer.content else None
        row, *more = await recorded(plane, request_id)
        known = ("actor_id", "actor_role", "outcome", "idempotency_key", "action", "kind")
        assert [row[name] for name in known] == [
            *("bootstrap", "admin", "done", request_id, verb, kind)
        ]
        assert row["object_id"] in path or row["object_id"] == shown["id"]
        assert (row["before"] is None) == (verb == "create")
        assert (row["after"] is None) == (verb in {"delete", "revoke"})
        if verb == "create":
            assert row["after"] == {name: shown[name] for name in shown if name != "key"}
        elif verb not in {"rotate", "revoke"} and row["object_id"] in before:
            assert row["before"] == before[row["object_id"]]
        assert [extra["action"] for extra in more] == (["create"] if verb == "rotate" else [])
        before[row["object_id"]] = row["after"]
        if method == "POST":
            made = shown["id"]


async def test_every_refused_write_leaves_a_row(plane) -> None:
    for number, (method, path, kind) in enumerate(await write_routes(plane)):
        if path.endswith(("/sweeps", "/texts")):  # take nothing that could be wrong
            continue
        if "/alertmanager/" in path:  # reports come every few seconds, and are no writes of people
            continue
        request_id = f"audit-refused-{number}"
        concrete = re.sub("{[a-z_]+}", "no-such-thing", path)
        answer = await plane.admin.request(
            method, concrete, content=b"[]", headers={"x-request-id": request_id}
        )
        problem = answer.json()
        assert answer.status_code in {400, 404}, (method, path, problem)
        assert problem["request_id"] == request_id
        (row,) = await recorded(plane, request_id)
        seen = (row["outcome"], row["action"], row["kind"], row["before"], row["after"])
        assert seen == (problem["code"], method.lower(), kind, None, None)
        assert row["detail"] == problem["detail"]


async def test_a_forbidden_caller_is_recorded_and_an_unknown_one_is_not(plane) -> None:
    key = (await plane.admin.post("/v1/admin-keys", json={"role": "viewer"})).json()
    for text, status, rows in ((key["key"], 403, 1), ("sk-sluice-wrong", 401, 0)):
        headers = {"Authorization": f"Bearer {text}", "x-request-id": f"audit-{status}"}
        answer = await plane.admin.put("/v1/tiers/audit-no", json={}, headers=headers)
        assert answer.status_code == status
        found = await recorded(plane, f"audit-{status}")
        assert [(row["actor_id"], row["actor_role"]) for row in found] == (
            [(key["id"], "viewer")] * rows
        )


async def test_no_row_holds_the_text_of_a_key(plane) -> None:
    """Not of one that was made, and not of one that was pasted where an id belongs."""
    texts = []
    for path, body in (("/v1/tenants/audit/keys", {}), ("/v1/admin-keys", {"role": "viewer"})):
        made = (
            await plane.admin.post(path, json=body, headers={"Idempotency-Key": f"secret-{path}"})
        ).json()
        rotated = (await plane.admin.post(f"{path}/{made['id']}/rotate")).json()
        assert (await plane.admin.delete(f"{path}/{made['key']}")).status_code == 404
        texts += [made["key"], rotated["key"]]
    url = plane.spec.env["CONTROL_PLANE__DATABASE_URL"].replace("+asyncpg", "")
    connection = await asyncpg.connect(url)
    try:
        for table in ("audit", "idempotent_answers", "api_keys", "admin_keys"):
            rows = str([tuple(row) for row in await connection.fetch(f"SELECT * FROM {table}")])
            for text in texts:
                assert text not in rows, table
    finally:
        await connection.close()


async def test_the_log_is_read_newest_first_in_pages_and_filtered(plane) -> None:
    admin = plane.admin
    for rpm in range(5):
        await plane.put("tiers/audit-pages", rpm=rpm)
    query = "kind=tiers&object_id=audit-pages&actor=bootstrap"
    all_rows = (await admin.get(f"/v1/audit?{query}")).json()["data"]
    assert [row["after"]["rpm"] for row in all_rows] == [4, 3, 2, 1, 0]
    first = (await admin.get(f"/v1/audit?{query}&limit=2")).json()
    after = first["data"][-1]["id"]
    rest = (await admin.get(f"/v1/audit?{query}&limit=3&after={after}")).json()
    assert first["data"] + rest["data"] == all_rows
    assert (first["has_more"], rest["has_more"]) == (True, False)
    since = {"object_id": "audit-pages", "since": all_rows[1]["at"]}
    assert (await admin.get("/v1/audit", params=since)).json()["data"] == all_rows[:2]
    for nothing in ("actor=nobody", "kind=%00", "since=2999-01-01T00:00:00Z"):
        assert (await admin.get(f"/v1/audit?{nothing}")).json()["data"] == []
    for wrong in ("yesterday", "2030-01-01", "2030-01-01T00:00:00"):
        answer = await admin.get("/v1/audit", params={"since": wrong})
        assert (answer.status_code, answer.json()["param"]) == (400, "since")
