"""Names on a real PostgreSQL: models, releases, aliases, and who may take which."""

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire
from tests.integration.artifact_site import Site

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

BASE, OTHER_BASE = "1a" * 32, "2b" * 32
FIRST, SECOND = "3c" * 32, "4d" * 32


@pytest_asyncio.fixture(loop_scope="session")
async def plane(site: Site) -> Any:
    """A control plane with two tenants and a pool for each of two bases."""
    control_plane = site.plane
    await control_plane.put("tiers/t")
    for tenant in ("acme", "zoe"):
        await control_plane.put(f"tenants/{tenant}", tier_id="t")
    for pool, base in (("one", BASE), ("two", OTHER_BASE)):
        await control_plane.put(f"bases/{base}", context_tokens_max=64)
        await control_plane.put(f"pools/{pool}", base_digest=base, engine="sim", replicas_wanted=0)
    return control_plane


async def refused(plane, path: str, status: int, param: str | None, **body: object) -> str:
    """Put what must be refused; return why it was."""
    answer = await plane.admin.put(f"/v1/{path}", json=body)
    problem = answer.json()
    assert (answer.status_code, problem.get("param")) == (status, param), problem
    return problem["detail"]


async def releases(plane, model: str) -> dict[str, dict[str, str]]:
    answer = await plane.admin.get("/v1/releases", params={"model_id": model})
    return {row["id"]: row for row in answer.json()["data"]}


async def test_the_earlier_target_of_a_model_keeps_its_name(plane) -> None:
    body = {"base_digest": BASE, "pool_id": "one"}
    await plane.put("models/m", **body)
    made = await plane.put("models/m", **body, adapter_digest=FIRST)
    assert made["release"] == "3c3c3c3c-1a1a1a1a"
    await plane.put("models/m", **body, adapter_digest=SECOND, release="v2")
    await plane.put("models/n", **body, release="v2")
    found = await releases(plane, "m")
    assert {name: row["adapter_digest"] for name, row in found.items()} == {
        "m@1a1a1a1a1a1a": "",
        "m@3c3c3c3c-1a1a1a1a": FIRST,
        "m@v2": SECOND,
    }
    one = (await plane.admin.get("/v1/releases/m@v2")).json()
    assert one == found["m@v2"]
    assert one == {
        "id": "m@v2",
        "model_id": "m",
        "base_digest": BASE,
        "adapter_digest": SECOND,
        "pool_id": "one",
    }
    told = await refused(plane, "models/m", 409, "release", **body, release="v2")
    assert "m@v2 has other digests" in told
    assert (await plane.admin.get("/v1/models/m")).json()["adapter_digest"] == SECOND
    # Back to an earlier one, by its digests or by its name.
    await plane.put("models/m", **body, adapter_digest=FIRST)
    await plane.put("models/m", **body, release="1a1a1a1a1a1a")
    assert await releases(plane, "m") == found


async def test_releases_are_served_where_their_base_is(plane) -> None:
    await plane.put("models/m", base_digest=BASE, pool_id="one", release="1")
    await plane.put("models/m", base_digest=OTHER_BASE, pool_id="two", release="2")
    await plane.put("pools/three", base_digest=OTHER_BASE, engine="sim", replicas_wanted=0)
    await plane.put(
        "models/m",
        base_digest=OTHER_BASE,
        pool_id="three",
        adapter_digest=FIRST,
        release="3",
    )
    pools = {name: row["pool_id"] for name, row in (await releases(plane, "m")).items()}
    assert pools == {"m@1": "one", "m@2": "three", "m@3": "three"}
    assert (await plane.admin.delete("/v1/pools/one")).status_code == 204
    assert (await releases(plane, "m"))["m@1"]["pool_id"] == ""
    kept = await plane.admin.delete(f"/v1/bases/{BASE}")
    assert (kept.status_code, kept.json()["code"]) == (409, "conflict")
    assert "used by releases" in kept.json()["detail"]
    current = await plane.admin.delete("/v1/releases/m@3")
    assert (current.status_code, "serves this release" in current.text) == (409, True)
    assert (await plane.admin.delete("/v1/releases/m@1")).status_code == 204
    assert (await plane.admin.delete(f"/v1/bases/{BASE}")).status_code == 204
    assert (await plane.admin.delete("/v1/models/m")).status_code == 204
    assert await releases(plane, "m") == {}
    assert (await plane.admin.delete("/v1/releases/m@2")).status_code == 404


async def test_an_alias_names_a_model_or_a_release_and_keeps_it(plane) -> None:
    body = {"base_digest": BASE, "pool_id": "one"}
    await plane.put("models/m", **body, release="1")
    await plane.put("models/m", **body, adapter_digest=FIRST, release="2")
    await plane.put("models/acme/own", **body, owner_tenant_id="acme")
    for name, target in (("latest", "m"), ("stable", "m@1"), ("latest", "m@2"), ("latest", "m")):
        shown = await plane.put(f"aliases/{name}", target=target)
        assert shown == {"id": name, "target": target, "owner_tenant_id": ""}
    assert (await plane.put("aliases/acme/x", target="m", owner_tenant_id="acme"))["id"] == "acme/x"
    for status, param, name, alias in (
        (400, "target", "a", {"target": "none"}),
        (400, "target", "a", {"target": "latest"}),
        (400, "target", "a", {"target": "m@3"}),
        (400, "target", "a", {}),
        (409, "id", "m", {"target": "acme/own", "owner_tenant_id": "acme"}),
        (400, "id", "a@1", {"target": "m"}),
        (400, "owner_tenant_id", "a", {"target": "acme/own"}),
        (400, "target", "a", {"target": "acme/own", "owner_tenant_id": "zoe"}),
        (400, "owner_tenant_id", "a", {"target": "m", "owner_tenant_id": "nobody"}),
        (400, "owner_tenant_id", "acme/y", {"target": "m"}),
    ):
        await refused(plane, f"aliases/{name}", status, param, **alias)
    assert "one of aliases" in await refused(plane, "models/latest", 409, "id", **body)
    for path in ("models/m", "releases/m@1"):
        answer = await plane.admin.delete(f"/v1/{path}")
        assert (answer.status_code, "used by aliases" in answer.text) == (409, True)
    assert (await plane.admin.delete("/v1/aliases/stable")).status_code == 204
    assert (await plane.admin.delete("/v1/releases/m@1")).status_code == 204


async def test_a_tenants_id_is_its_name_space(plane) -> None:
    body = {"base_digest": BASE, "pool_id": "one"}
    for owner in ({}, {"owner_tenant_id": "zoe"}):
        told = await refused(plane, "models/acme/m", 400, "owner_tenant_id", **body, **owner)
        assert "names that begin with acme/ are of tenant acme" in told
    await plane.put("models/acme/m", **body, owner_tenant_id="acme")
    await plane.put("models/meta/m", **body)  # no tenant's
    await plane.put("models/org/deep/m", **body, owner_tenant_id="acme")
    for tenant, owned in (("meta", "meta/m"), ("org", "org/deep/m")):
        told = await refused(plane, f"tenants/{tenant}", 409, "id", tier_id="t")
        assert owned in told
    await plane.put("tenants/acme", tier_id="t", name="it was there before its models")
    await plane.put("tenants/met", tier_id="t")
    for none in ("acme/eu", "eu@acme"):  # below it, names would be another's, or none at all
        told = await refused(plane, f"tenants/{none.replace('/', '%2F')}", 400, "id", tier_id="t")
        assert "it has no / and no @" in told


async def test_one_name_has_one_owner_however_many_ask_at_once(plane) -> None:
    await plane.put("models/m", base_digest=BASE, pool_id="one")

    async def put(path: str, body: dict[str, str]) -> int:
        return (await plane.admin.put(f"/v1/{path}", json=body)).status_code

    for number in range(5):
        statuses = await asyncio.gather(
            put(f"models/x{number}", {"base_digest": BASE, "pool_id": "one"}),
            put(f"aliases/x{number}", {"target": "m"}),
        )
        assert sorted(statuses) == [201, 409]
        statuses = await asyncio.gather(
            put(f"models/new{number}/m", {"base_digest": BASE, "pool_id": "one"}),
            put(f"tenants/new{number}", {"tier_id": "t"}),
        )
        assert statuses in ([201, 409], [400, 201]), statuses


async def test_limits_and_fallbacks_are_of_models_that_are_there(plane) -> None:
    body = {"base_digest": BASE, "pool_id": "one"}
    await plane.put("models/m", **body, release="1")
    await plane.put("models/acme/own", **body, owner_tenant_id="acme", release="1")
    await plane.put("aliases/best", target="m")
    tier = await plane.put("tiers/g", requests_max=5, model_limits={"m": {"rpm": 3}})
    assert (tier["requests_max"], tier["model_limits"]) == (5, {"m": {"rpm": 3}})
    for wrong in ("none", "best", "m@1"):
        told = await refused(plane, "tiers/g", 400, "model_limits", model_limits={wrong: {}})
        assert f"there is no model {wrong}" in told
    tenant = {"tier_id": "g", "limits": {"tpm": 9}, "fallbacks": {"*": "m", "acme/own": "best"}}
    shown = await plane.put("tenants/acme", **tenant)
    assert {name: shown[name] for name in tenant} == tenant
    for fallbacks, said in (
        ({"m": "none"}, "alias none that tenant zoe may use"),
        ({"none": "m"}, "alias none that"),
        ({"m": "acme/own"}, "alias acme/own that"),
        ({"m": "m"}, "cannot stand in for itself"),
        ({"m": "m@2"}, "alias m@2 that"),
    ):
        told = await refused(
            plane, "tenants/zoe", 400, "fallbacks", tier_id="g", fallbacks=fallbacks
        )
        assert said in told
    await plane.put("tenants/zoe", tier_id="g", fallbacks={"best": "m@1"})
    for pins in ({"m": "2"}, {"best": "1"}, {"acme/own": "1"}):
        told = await refused(plane, "tenants/zoe", 400, "pins", tier_id="g", pins=pins)
        assert "there is no release" in told
    shown = await plane.put("tenants/zoe", tier_id="g", pins={"m": "1"})
    assert shown["pins"] == {"m": "1"}


async def test_watchers_are_told_of_names_and_limits(plane, eventually) -> None:
    body = {"base_digest": BASE, "pool_id": "one"}
    await plane.put("models/m", **body, release="1")
    await plane.put("aliases/best", target="m")
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "g")
    state = watcher.state
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        assert await watcher.wait_synced(20)
        await eventually(lambda: "best" in state.aliases, "what was written just now is told")
        assert state.aliases["best"] == wire.Alias(id="best", target="m")
        assert state.releases["m@1"] == wire.Release(
            id="m@1", model_id="m", base_digest=BASE, pool_id="one"
        )
        await plane.put("models/m", **body, adapter_digest=FIRST, release="2")
        await plane.put("aliases/best", target="m@1")
        await plane.put("tiers/t", requests_max=3, model_limits={"m": {"context_tokens_max": 9}})
        await plane.put("tenants/acme", tier_id="t", limits={"rpm": 2}, fallbacks={"m": "best"})
        await plane.put("tenants/zoe", tier_id="t", pins={"m": "2"})
        await eventually(
            lambda: bool(state.tenants["acme"].fallbacks), "the tenant's fallback arrives"
        )
        assert state.releases["m@2"].adapter_digest == FIRST
        assert (state.models["m"].release, state.aliases["best"].target) == ("2", "m@1")
        assert state.tiers["t"].requests_max == 3
        assert state.tiers["t"].model_limits["m"] == wire.Limits(context_tokens_max=9)
        assert state.tenants["acme"].limits == wire.Limits(rpm=2)
        await eventually(lambda: bool(state.tenants["zoe"].pins), "the tenant's pin arrives")
        assert state.tenants["zoe"].pins == {"m": "2"}
        await plane.put("tenants/acme", tier_id="t")
        await plane.admin.delete("/v1/aliases/best")
        await plane.admin.delete("/v1/models/m")
        await eventually(lambda: not state.models, "the model goes")
        assert (dict(state.releases), dict(state.aliases)) == ({}, {})
        assert state.tenants["acme"].limits == wire.Limits()
        running.cancel()
