"""What a rollout is about goes away, at any stage: it ends, and leaves nothing behind."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.integration.rollout_site import (
    BASE,
    LONG,
    NEW,
    SHORT,
    begin,
    make_fleet,
    make_model,
    reaches,
    running_gateway,
    running_telemetry,
    shown,
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
]

# What the last release's control plane may do, which knows of no rollouts; or somebody by hand.
_GOES = {
    "canary": ("DELETE FROM releases WHERE id = $1 || '@new'", "release_gone"),
    "control": ("DELETE FROM releases WHERE id = $1 || '@old'", "release_gone"),
    "model": ("UPDATE models SET release = 'other' WHERE id = $1", "model_changed"),
    "owner": (
        "UPDATE tenants SET is_disabled = true"
        " WHERE id = (SELECT owner_tenant_id FROM models WHERE id = $1)",
        "owner_disabled",
    ),
}
_STAGES = ("planned", "running", "paused")


@asynccontextmanager
async def _site(start_control_plane, url: str, directory: Path) -> AsyncIterator[Any]:
    """A control plane, a gateway that confirms, and a connection to the database."""
    database = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        async with (
            running_telemetry() as telemetry,
            start_control_plane(url, directory, **telemetry.environment) as plane,
            running_gateway(plane.grpc_address) as gateway,
        ):
            await make_fleet(plane)
            yield plane, gateway, database
    finally:
        await database.close()


async def test_it_is_aborted_at_any_stage(
    database_url, start_control_plane, tmp_path: Path, eventually
) -> None:
    async with _site(start_control_plane, database_url, tmp_path) as (plane, gateway, database):
        await plane.put("tiers/t")
        begun: dict[str, tuple[str, str]] = {}
        for what, stage in product(_GOES, _STAGES):
            tenant = f"{what}-{stage}"
            await plane.put(f"tenants/{tenant}", tier_id="t")
            model = f"{tenant}/m"
            await make_model(plane, model, owner_tenant_id=tenant)
            rollout = await begin(plane, model, plan=LONG, is_started=stage != "planned")
            begun[model] = (rollout, stage)
        for rollout, stage in begun.values():
            if stage != "planned":
                await eventually(reaches(plane, rollout, share_percent=10), "the first stage opens")
            if stage == "paused":
                assert (await plane.admin.post(f"/v1/rollouts/{rollout}/pause")).status_code == 200
        for model in begun:
            await database.execute(_GOES[model.partition("-")[0]][0], model)
        for model, (rollout, _) in begun.items():
            reason = _GOES[model.partition("-")[0]][1]
            over = reaches(
                plane, rollout, phase="aborted", reason=reason, share_percent=0, is_live=False
            )
            await eventually(over, "it is aborted, and settles")
            assert (await shown(plane, rollout))["explanation"]
        await eventually(lambda: not gateway.splits, "the splits go")
        for model in begun:
            assert (await plane.admin.delete(f"/v1/models/{model}")).status_code == 204


async def test_between_its_end_and_its_settling_nothing_is_changed_under_it(
    database_url, start_control_plane, tmp_path: Path, eventually
) -> None:
    """A gateway that does not confirm holds the settling up, until it counts as gone."""
    async with _site(start_control_plane, database_url, tmp_path) as (plane, _, database):
        await make_model(plane, "m")
        # Before it begins: it may end and settle in two seconds.
        await database.execute(
            "INSERT INTO gateway_confirmations (id, version, oldest_open_unix_ms, seen_at)"
            " VALUES ('silent', 0, 0, now() + interval '1 hour')"
        )
        rollout = await begin(plane, "m", plan=SHORT)
        await eventually(reaches(plane, rollout, phase="done"), "it takes over", 90)
        assert (await shown(plane, rollout))["is_live"]
        body = {"base_digest": BASE, "pool_id": "main", "adapter_digest": NEW}
        for refused in (
            await plane.admin.put("/v1/models/m", json=body),
            await plane.admin.delete("/v1/models/m"),
            await plane.admin.delete("/v1/releases/m@old"),
        ):
            assert refused.status_code == 409, refused.text
            assert rollout in refused.json()["detail"]
        # Somebody does it all the same, and leaves a demand in the pool.
        await database.execute(
            "INSERT INTO pool_demands (pool_id, model_id, replicas) VALUES ('main', 'm', 3)"
        )
        await database.execute("DELETE FROM releases WHERE id = 'm@old'")
        await database.execute("DELETE FROM gateway_confirmations WHERE id = 'silent'")
        over = reaches(plane, rollout, phase="done", is_live=False)
        await eventually(over, "it settles")
        assert await database.fetchval("SELECT count(*) FROM pool_demands") == 0
        wanted = "SELECT replicas_wanted FROM pools WHERE id = 'main'"
        assert await database.fetchval(wanted) == 2, "what serves the model keeps it"


async def test_a_model_that_is_deleted_takes_all_of_its_rollout_along(
    database_url, start_control_plane, tmp_path: Path, eventually
) -> None:
    async with _site(start_control_plane, database_url, tmp_path) as (plane, gateway, database):
        await make_model(plane, "m")
        await make_model(plane, "other")
        rollout = await begin(plane, "m", plan=LONG)
        await eventually(reaches(plane, rollout, share_percent=10), "the first stage opens")
        refused = await plane.admin.delete("/v1/models/m")
        assert refused.status_code == 409, refused.text
        await database.execute(
            "INSERT INTO pool_demands (pool_id, model_id, replicas) VALUES ('main', 'm', 1)"
        )
        await database.execute("UPDATE pools SET rollout_replicas = 1 WHERE id = 'main'")
        await database.execute("DELETE FROM models WHERE id = 'm'")
        assert (await plane.admin.get(f"/v1/rollouts/{rollout}")).status_code == 404
        await eventually(lambda: "m" not in gateway.splits, "the split goes")

        async def is_given_back() -> bool:
            query = "SELECT rollout_replicas FROM pools WHERE id = 'main'"
            return await database.fetchval(query) is None

        await eventually(is_given_back, "what it had asked for is given back")
        other = await begin(plane, "other", plan=LONG)
        await eventually(reaches(plane, other, share_percent=10), "others go on")


async def test_no_session_stays_pinned_to_a_deleted_release(shared_control_plane) -> None:
    plane = shared_control_plane
    await plane.put(f"bases/{BASE}", context_tokens_max=64)
    await plane.put("pools/pinned", base_digest=BASE, engine="sim", replicas_wanted=0)
    await plane.put("tiers/pinned")

    async def pins(tenant: str) -> object:
        return (await plane.admin.get(f"/v1/tenants/{tenant}")).json()["pins"]

    for model in ("pinned", "kept"):
        await make_model(plane, model, "pinned")
    for tenant, release in (("pinned-new", "new"), ("pinned-old", "old")):
        wanted = {"pinned": release, "kept": "new"}
        await plane.put(f"tenants/{tenant}", tier_id="pinned", pins=wanted)
    assert (await plane.admin.delete("/v1/releases/pinned@new")).status_code == 204
    assert await pins("pinned-new") == {"kept": "new"}
    assert await pins("pinned-old") == {"pinned": "old", "kept": "new"}
    assert (await plane.admin.delete("/v1/models/pinned")).status_code == 204
    assert await pins("pinned-old") == {"kept": "new"}
