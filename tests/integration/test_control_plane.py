"""The admin REST as a process on a real PostgreSQL, from outside."""

import asyncio
import hashlib
import json
import re

import asyncpg
import httpx
import pytest

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DIGEST = "ab" * 32
OTHER = "cd" * 32


@pytest.fixture
def plane(shared_control_plane):
    return shared_control_plane


async def _demo(plane, *, engine: str = "sim", replicas: int = 1) -> None:
    await plane.put("tiers/standard", priority=1, rpm=60, tpm=10_000)
    await plane.put("tenants/acme", name="Acme", tier_id="standard")
    await plane.put(f"bases/{DIGEST}", name="tiny", context_tokens_max=2048)
    await plane.put("pools/main", base_digest=DIGEST, engine=engine, replicas_wanted=replicas)
    await plane.put("models/org/tiny:1", base_digest=DIGEST, pool_id="main")


async def test_a_get_returns_the_put_object(plane) -> None:
    admin = plane.admin
    await _demo(plane)
    for path, body in {
        "tiers/gold": {"priority": 9, "rpm": 1, "tpm": 2, "context_tokens_max": 3},
        "tiers/batch": {"reserved_percent": 5, "is_preemptible": True},
        "tenants/zoe": {"name": "Zoë", "tier_id": "gold", "is_disabled": True, "weight": 7},
        f"bases/{OTHER}": {"name": "b", "context_tokens_max": 4096},
        "pools/second": {
            "base_digest": OTHER,
            "engine": "openvino",
            "replicas_wanted": 0,
            "engine_options": {"slots": "8"},
            "cell_replicas_max": 8,
            "roles": {"prefill": 1, "decode": 3},
        },
        "models/a": {"base_digest": OTHER, "pool_id": "second", "owner_tenant_id": "zoe"},
    }.items():
        created = await admin.put(f"/v1/{path}", json=body)
        assert created.status_code == 201, created.text
        again = await admin.put(f"/v1/{path}", json=body)
        assert (again.status_code, again.json()) == (200, created.json())
        found = (await admin.get(f"/v1/{path}")).json()
        assert found == created.json()
        assert found | body == found
        kind, _, key = path.partition("/")
        listed = (await admin.get(f"/v1/{kind}")).json()
        assert found in listed["data"]
        name = "digest" if kind == "bases" else "id"
        assert found[name] == key
    assert (await admin.get("/v1/models/org/tiny:1")).json()["owner_tenant_id"] == ""
    cells = (await admin.get("/v1/cells")).json()["data"]
    assert {("main-0", "main"), ("second-0", "second")} <= {(c["id"], c["pool_id"]) for c in cells}
    for path in (
        *("models/a", "pools/second", f"bases/{OTHER}", "tenants/zoe"),
        *("tiers/gold", "tiers/batch"),
    ):
        assert (await admin.delete(f"/v1/{path}")).status_code == 204
        assert (await admin.get(f"/v1/{path}")).status_code == 404
        assert (await admin.delete(f"/v1/{path}")).status_code == 404


async def test_lists_come_in_pages(plane) -> None:
    for number in range(5):
        await plane.put(f"tiers/zz{number}")
    first = (await plane.admin.get("/v1/tiers?limit=3&after=zz")).json()
    rest = (await plane.admin.get("/v1/tiers?limit=3&after=zz2")).json()
    assert [tier["id"] for tier in first["data"] + rest["data"]] == [f"zz{n}" for n in range(5)]
    assert (first["has_more"], rest["has_more"]) == (True, False)


BAD_REQUESTS = [  # method, path, body, status, code, param
    ("PUT", "tiers/t", b"{", 400, "invalid_request", None),
    ("PUT", "tiers/t", b"\xff\xfe", 400, "invalid_request", None),
    ("PUT", "tiers/t", b"[]", 400, "invalid_request", None),
    ("PUT", "tiers/t", b'{"rpm": -1}', 400, "invalid_request", "rpm"),
    ("PUT", "tiers/t", b'{"rpm": NaN}', 400, "invalid_request", "rpm"),
    ("PUT", "tiers/t", b'{"typo": 1}', 400, "invalid_request", "typo"),
    ("PUT", "tiers/t", b'{"reserved_percent": 101}', 400, "invalid_request", "reserved_percent"),
    ("PUT", "tiers/t", b'{"rpm": 1' + b" " * 300_000 + b"}", 413, "request_too_large", None),
    ("PUT", "tiers/a%20b", b"{}", 400, "invalid_request", "id"),
    ("PUT", "tiers/a%00b", b"{}", 400, "invalid_request", "id"),
    ("PUT", "tenants/t", b'{"tier_id": "none"}', 400, "invalid_request", "tier_id"),
    ("PUT", "tenants/t", b'{"tier_id": "standard", "name": "a\\u0000"}', 400, "invalid_request", "name"),
    ("PUT", "tenants/t", b'{"tier_id": "standard", "name": "\\ud800"}', 400, "invalid_request", None),
    ("PUT", "bases/nothex", b'{"context_tokens_max": 1}', 400, "invalid_request", "digest"),
    ("PUT", f"bases/{'0' * 64}", b"{}", 400, "invalid_request", "context_tokens_max"),
    ("DELETE", "tiers/standard", b"", 409, "conflict", None),
    ("DELETE", "pools/main", b"", 409, "conflict", None),
    ("DELETE", f"bases/{DIGEST}", b"", 409, "conflict", None),
    ("GET", "tiers/none", b"", 404, "not_found", None),
    ("GET", "nothing", b"", 404, "not_found", None),
    ("GET", "tiers?limit=0", b"", 400, "invalid_request", "limit"),
    ("GET", "tiers?limit=" + "0" * 8 + "1" + "0" * 20, b"", 400, "invalid_request", "limit"),
    ("POST", "tiers/standard", b"{}", 405, "method_not_allowed", None),
    ("POST", "tenants/none/keys", b"{}", 404, "not_found", None),
    ("GET", "tenants/none/keys", b"", 404, "not_found", None),
    ("POST", "tenants/acme/keys", b'{"rpm": true}', 400, "invalid_request", "rpm"),
    ("DELETE", "tenants/acme/keys/none", b"", 404, "not_found", None),
    ("PUT", "models/m", json.dumps({"base_digest": OTHER, "pool_id": "main"}).encode(), 400, "invalid_request", "pool_id"),
    ("PUT", "pools/main", json.dumps({"base_digest": DIGEST, "engine": "x"}).encode(), 409, "conflict", None),
]  # fmt: skip


async def test_bad_requests(plane) -> None:
    await _demo(plane, replicas=1)
    for method, path, body, status, code, param in BAD_REQUESTS:
        answer = await plane.admin.request(method, f"/v1/{path}", content=body)
        case = (method, path, body[:40], answer.text)
        assert answer.status_code == status, case
        assert answer.headers["content-type"].startswith("application/problem+json"), case
        problem = answer.json()
        seen = (problem["code"], problem.get("param"), problem["status"])
        assert seen == (code, param, status), case
        assert problem["detail"], case


async def test_a_query_without_a_reader_is_refused(plane) -> None:
    for path, takes in {
        "tiers?cursor=x": "takes after, limit",
        "rollouts?model=m": "takes after, limit, model_id",
        "tiers/standard?limit=1": "takes none",
    }.items():
        response = await plane.admin.get(f"/v1/{path}")
        name = path.partition("?")[2].partition("=")[0]
        assert (response.status_code, response.json()["param"]) == (400, name)
        assert takes in response.json()["detail"]


async def test_without_the_admin_key_nothing_is_told(plane) -> None:
    async with httpx.AsyncClient(base_url=plane.admin.base_url) as stranger:
        for value in (
            None,
            "",
            "Bearer",
            "Bearer wrong",
            "Basic YTpi",
            "Bearer \xff",
            "bearer x y",
        ):
            headers = {} if value is None else {"Authorization": value.encode("latin-1")}
            for path in ("/v1/tenants", "/v1/nothing"):
                answer = await stranger.get(path, headers=headers)
                seen = (answer.status_code, answer.json()["code"])
                assert seen == (401, "invalid_api_key"), value
        assert (await stranger.get("/healthz")).status_code == 200
        metrics = (await stranger.get("/metrics")).text
    assert 'control_plane_requests_total{route="/v1/tenants",status="401"}' in metrics


async def test_a_key_is_shown_once_and_only_its_hash_is_kept(plane) -> None:
    await _demo(plane)
    admin = plane.admin
    answer = await admin.post("/v1/tenants/acme/keys", json={"rpm": 5})
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    made = answer.json()
    assert made["key"].startswith("sk-sluice-")
    listed = (await admin.get("/v1/tenants/acme/keys")).json()["data"]
    one = (await admin.get(f"/v1/tenants/acme/keys/{made['id']}")).json()
    assert listed == [one]
    assert (one["id"], one["rpm"], one["tenant_id"]) == (made["id"], 5, "acme")
    assert "key" not in one
    connection = await asyncpg.connect(
        plane.spec.env["CONTROL_PLANE__DATABASE_URL"].replace("+asyncpg", "")
    )
    try:
        query = "SELECT * FROM api_keys WHERE id = $1"  # others test beside us
        row = dict(await connection.fetchrow(query, made["id"]))
    finally:
        await connection.close()
    assert row["secret_sha256"] == hashlib.sha256(made["key"].encode()).digest()
    assert made["key"] not in str(row)
    assert made["key"] not in plane.spec.log_file.read_text()
    tenant = (await admin.get("/v1/tenants/acme")).text
    assert "salt" not in tenant
    assert (await admin.delete(f"/v1/tenants/acme/keys/{made['id']}")).status_code == 204
    assert (await admin.get("/v1/tenants/acme/keys")).json()["data"] == []


async def test_tiers_cannot_be_promised_more_than_there_is(plane) -> None:
    admin = plane.admin
    await plane.put("tiers/res0", reserved_percent=70)
    refused = await admin.put("/v1/tiers/res1", json={"reserved_percent": 30.1})
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert refused.json()["param"] == "reserved_percent"
    assert "can have 30, not 30.1" in refused.json()["detail"]
    await plane.put("tiers/res1", reserved_percent=30)
    await plane.put("tiers/res0", reserved_percent=70, rpm=5)  # its own share is not counted twice
    await plane.put("tiers/res0", reserved_percent=0)
    racing = (admin.put(f"/v1/tiers/res{n}", json={"reserved_percent": 40}) for n in (2, 3, 4))
    statuses = sorted(answer.status_code for answer in await asyncio.gather(*racing))
    assert statuses == [201, 409, 409]
    for number in range(5):
        await admin.delete(f"/v1/tiers/res{number}")


async def test_the_description_names_existing_routes(plane) -> None:
    described = (await plane.admin.get("/openapi.json")).json()
    assert described["openapi"] == "3.1.0"
    for path, operations in described["paths"].items():
        concrete = re.sub("{[a-z_]+}", "x", path)
        for method in set(operations) - {"parameters"}:
            answer = await plane.admin.request(method.upper(), concrete, content=b"[]")
            assert answer.status_code not in {401, 405, 500}, (method, path)
    schema = described["paths"]["/v1/tiers/{id}"]["put"]["requestBody"]["content"]
    assert "ttft_deadline_ms" in schema["application/json"]["schema"]["properties"]


async def test_concurrent_writers_all_succeed(plane) -> None:
    await plane.put("tiers/t")

    async def write(number: int) -> int:
        body = {"tier_id": "t", "weight": 1 + number}
        return (await plane.admin.put(f"/v1/tenants/x{number % 5}", json=body)).status_code

    statuses = await asyncio.gather(*(write(number) for number in range(60)))
    assert set(statuses) <= {200, 201}
    assert statuses.count(201) == 5


async def test_a_taken_port_and_a_missing_setting_end_it_with_one_line(plane) -> None:
    for change, fix in (
        ({}, "taken"),
        ({"CONTROL_PLANE__GRPC_ADDRESS": ""}, "CONTROL_PLANE__GRPC_ADDRESS"),
        ({"CONTROL_PLANE__TYPO": "1"}, "unknown setting CONTROL_PLANE__TYPO"),
    ):
        process = await asyncio.create_subprocess_exec(
            *plane.spec.command,
            env={**plane.spec.env, **change},
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode in {1, 2}
        assert fix in errors.decode().strip().splitlines()[-1]
