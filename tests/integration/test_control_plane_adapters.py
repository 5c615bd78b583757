"""Adapters across models, where they lie, and what becomes of artifacts that nobody needs."""

import asyncio
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import text

from control_plane.database import Database
from sluice.artifacts import digest_directory
from tests.integration.artifact_site import Site, begin, push
from tests.support.random_models import write_random_adapter, write_random_model

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]
BY_HAND = "b4" * 32


async def listed(client: Any, path: str, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def hold(database_url: str, *pairs: tuple[str, str]) -> None:
    """Note that artifacts lie on nodes, as the recorder does for agents."""
    database = Database(database_url)
    query = text("INSERT INTO node_artifacts (node_id, digest) VALUES (:node, :digest)")
    rows = [{"node": node, "digest": digest} for node, digest in pairs]
    try:
        await database.run(lambda found: found.execute(query, rows))
    finally:
        await database.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(package_site: Site) -> Site:
    """One for all tests here: making what they look at takes four inspections."""
    await package_site.empty()
    return package_site


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def digests(site: Site) -> dict[str, str]:
    """A base with a model, an adapter of everybody and one of acme; both are releases of models."""
    base, shared, own, idle = (site.home / name for name in ("base", "shared", "own", "idle"))
    write_random_model(base)
    for seed, directory in enumerate((shared, own, idle)):
        write_random_adapter(directory, base, rank=2, seed=seed)
    found = {path.name: digest_directory(path) for path in (base, shared, own, idle)}
    put, admin = site.plane.put, site.admin
    assert (await push(admin, base)).is_success
    await put(f"bases/{found['base']}", context_tokens_max=64, name="tiny")
    await put("pools/main", base_digest=found["base"], engine="sim", replicas_wanted=0)
    acme = await site.publisher("acme")
    assert (await push(admin, shared, found["base"])).is_success
    assert (await push(admin, idle, found["base"])).is_success
    assert (await push(acme, own, found["base"])).is_success
    model = {"base_digest": found["base"], "pool_id": "main"}
    await put("models/tiny", **model)
    await put("models/voice", **model, adapter_digest=found["shared"], release="1")
    await put("models/voice", **model, adapter_digest=BY_HAND, release="2")
    owned = model | {"owner_tenant_id": "acme", "adapter_digest": found["own"]}
    await put("models/acme/voice", **owned, release="1")
    return found


async def test_adapters_with_their_releases_tenants_and_nodes(site, digests) -> None:
    nodes = (("n1", digests["shared"]), ("n2", digests["shared"]), ("n1", BY_HAND))
    await hold(site.database_url, *nodes)
    rows = {row["digest"]: row for row in await listed(site.admin, "/v1/adapters")}
    assert set(rows) == {digests["shared"], digests["own"], digests["idle"], BY_HAND}
    shared, own, by_hand = rows[digests["shared"]], rows[digests["own"]], rows[BY_HAND]
    assert (shared["releases"], shared["promoted"]) == (["voice@1"], [])
    assert (shared["is_public"], shared["tenant_ids"], shared["node_count"]) == (True, [], 2)
    assert shared["base_digests"] == [digests["base"]]
    assert shared["size_bytes"] > 0
    assert (own["releases"], own["promoted"]) == (["acme/voice@1"], ["acme/voice"])
    assert (own["is_public"], own["tenant_ids"], own["node_count"]) == (False, ["acme"], 0)
    assert (by_hand["is_uploaded"], by_hand["size_bytes"]) == (False, None)
    assert (by_hand["promoted"], by_hand["node_count"]) == (["voice"], 1)
    assert rows[digests["idle"]]["releases"] == []

    one = await site.admin.get(f"/v1/adapters/{digests['shared']}")
    assert one.json() == shared
    held = await listed(site.admin, f"/v1/artifacts/{digests['shared']}/nodes")
    assert [row["id"] for row in held] == ["n1", "n2"]
    first = await site.admin.get(f"/v1/artifacts/{digests['shared']}/nodes?limit=1")
    assert (len(first.json()["data"]), first.json()["has_more"]) == (1, True)
    missing = await site.admin.get(f"/v1/adapters/{digests['base']}")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


async def test_adapters_are_narrowed_and_paged(site, digests) -> None:
    async def found(**query: str) -> set[str]:
        return {row["digest"] for row in await listed(site.admin, "/v1/adapters", **query)}

    assert await found(model_id="voice") == {digests["shared"], BY_HAND}
    assert await found(tenant_id="acme") == {digests["own"]}
    assert len(await found(base_digest=digests["base"])) == 4
    assert await found(base_digest="00" * 32) == set()
    every = sorted(await found())
    page = (await site.admin.get("/v1/adapters?limit=3")).json()
    assert ([row["digest"] for row in page["data"]], page["has_more"]) == (every[:3], True)
    assert await found(after=every[2]) == {every[3]}


async def test_a_publisher_sees_its_own_and_shared_adapters(site, digests) -> None:
    other = await site.publisher("other")
    rows = {row["digest"]: row for row in await listed(other, "/v1/adapters")}
    assert set(rows) == {digests["shared"], digests["idle"], BY_HAND}
    assert (await other.get(f"/v1/adapters/{digests['own']}")).status_code == 404
    assert (await other.get(f"/v1/artifacts/{BY_HAND}/nodes")).status_code == 403
    acme = await site.publisher("acme")
    assert (await acme.get(f"/v1/adapters/{digests['own']}")).json()["tenant_ids"] == ["acme"]


async def test_artifacts_show_their_state_until_their_removal(site, digests) -> None:
    """The last test here: what it adds stays."""
    pin = f"/v1/artifacts/{digests['idle']}/pin"
    assert (await site.admin.put(pin, json={"is_pinned": True})).is_success
    spare = site.home / "spare"
    write_random_adapter(spare, site.home / "base", rank=2, seed=9)
    assert (await push(site.admin, spare, digests["base"])).is_success
    half = site.home / "half"
    write_random_adapter(half, site.home / "base", rank=2, seed=10)
    upload = (await begin(site.admin, half, digests["base"])).json()
    rows = {row["digest"]: row for row in await listed(site.admin, "/v1/artifacts/garbage")}
    assert {row["state"] for row in rows.values()} <= {"kept", "noticed", "grace"}
    needed = {digest: row["needed_by"] for digest, row in rows.items()}
    assert needed[digests["idle"]] == ["pinned"]
    assert needed[digests["shared"]] == ["release voice@1"]
    assert needed[digests["own"]] == ["model acme/voice", "release acme/voice@1"]
    base = needed[digests["base"]]
    assert [reason.split()[0] for reason in base] == [
        *("model", "release", "base", "upload", "adapter")
    ]
    assert {"base tiny", f"upload {upload['id']}"} <= set(base)
    assert needed[digest_directory(spare)] == []
    left = await listed(site.admin, "/v1/artifacts/garbage", is_needed="false")
    assert [row["digest"] for row in left] == [digest_directory(spare)]
    wrong = await site.admin.get("/v1/artifacts/garbage?is_needed=maybe")
    assert (wrong.status_code, wrong.json()["param"]) == (400, "is_needed")

    acme = await site.publisher("acme")
    assert (await acme.post("/v1/artifacts/sweeps")).status_code == 403
    assert (await acme.get("/v1/artifacts/garbage")).status_code == 403
    swept = await site.admin.post("/v1/artifacts/sweeps")
    while swept.status_code == 202:  # the machine stalls, or the regular one runs
        await asyncio.sleep(0.1)
        swept = await site.admin.post("/v1/artifacts/sweeps")
    told = swept.json()
    assert (told["state"], told["retired"], told["removed"], told["chunks"]) == ("done", [], [], 0)
    (row,) = await listed(site.admin, "/v1/artifacts/garbage", is_needed="false")
    assert (row["state"], row["goes_at"] > row["unreferenced_since"]) == ("grace", True)
    (audit,) = await listed(
        site.admin, "/v1/audit", kind="artifacts", object_id="artifacts", limit=1
    )
    assert (audit["action"], audit["outcome"]) == ("sweep", "done")
