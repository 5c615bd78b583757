"""`sluice tiers, models, fleet, admin-keys, audit` against a real control plane."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from cli.app import app
from tests.integration.conftest import ADMIN_KEY

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

BASE, OTHER, ADAPTER = "c1" * 32, "c2" * 32, "c3" * 32
Sluice = Callable[..., Awaitable[str]]


@pytest_asyncio.fixture(loop_scope="session")
async def sluice(shared_control_plane, monkeypatch) -> Sluice:
    """Run a command; return what it says, errors included."""
    plane = shared_control_plane
    monkeypatch.setenv("SLUICE_ADMIN_URL", str(plane.admin.base_url))
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)
    await plane.put("tiers/standard", rpm=60)
    await plane.put("tenants/cli-admin", tier_id="standard")
    await plane.put(f"bases/{BASE}", context_tokens_max=64)
    await plane.put("pools/cli-admin", base_digest=BASE, engine="sim", replicas_wanted=0)

    async def run(*words: str, status: int = 0) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, app, list(words))
        assert done.exit_code == status, (words, done.output)
        return done.output

    return run


async def as_json(sluice: Sluice, *words: str) -> Any:
    return json.loads(await sluice(*words, "--json"))


async def test_the_doctor_finds_a_lock_a_role_and_a_stale_page(
    sluice, shared_control_plane, postgres_server, monkeypatch, tmp_path
) -> None:
    url = postgres_server.url("shared")
    for name in ("OPENAI_BASE_URL", "SLUICE_TELEMETRY_URL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("SLUICE_DATABASE_URL", url)
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))

    async def found(*words: str) -> dict[str, Any]:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", "--json", *words])
        assert done.exit_code in {0, 1}, done.output
        return {it["check"]: it for it in json.loads(done.output)}

    good = await found()
    ready = ("control-plane", "versions", "clocks", "admin key", "schema", "database rights")
    assert {good[name]["level"] for name in ready} == {"ok"}, good
    connection = await asyncpg.connect("postgresql://" + url.partition("://")[2])
    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE tiers IN ACCESS EXCLUSIVE MODE")
            monkeypatch.setattr("cli.doctor.installation.LOCK_S_MAX", 0.0)
            held = (await found())["database locks"]
            assert held["level"] == "wrong"
            assert "pg_terminate_backend" in held["fix"]
    finally:
        await connection.close()
    made = await as_json(sluice, "admin-keys", "create", "publisher", "--tenant", "cli-admin")
    monkeypatch.setenv("SLUICE_ADMIN_KEY", made["key"])
    assert "/v1/nodes (403)" in (await found())["admin key"]["found"]
    page = str(shared_control_plane.admin.base_url).rstrip("/") + "/metrics"
    read = await found("--metrics-url", f"none={page[:-8]}/nothing", "--metrics-url", f"cp={page}")
    assert read["none"]["level"] == "wrong"
    assert read["cp"]["level"] == "ok"


async def test_a_tier_is_created_changed_and_deleted(sluice) -> None:
    await sluice("models", "create", "cli-tiered", "--base", BASE, "--pool", "cli-admin")
    words = ("--priority", "5", "--rpm", "9", "--model-limit", "cli-tiered rpm=3 tpm=4", "--batch")
    (tier,) = await as_json(sluice, "tiers", "create", "cli-tier", *words)
    assert (tier["priority"], tier["rpm"], tier["is_preemptible"]) == (5, 9, True)
    assert tier["model_limits"] == {"cli-tiered": {"rpm": 3, "tpm": 4}}
    assert await as_json(sluice, "tiers", "show", "cli-tier") == tier
    words = ("--tpm", "7", "--model-limit", "cli-tiered", "--no-batch")
    (changed,) = await as_json(sluice, "tiers", "update", "cli-tier", *words)
    assert changed == tier | {"tpm": 7, "model_limits": {}, "is_preemptible": False}
    assert "cli-tier" in await sluice("tiers", "list")
    assert "is not MODEL NAME=N" in await sluice(
        "tiers", "update", "cli-tier", "--model-limit", "m rps=1", status=2
    )
    assert "there is no tiers/none" in await sluice("tiers", "update", "none", status=1)
    assert "deleted tier cli-tier" in await sluice("tiers", "delete", "cli-tier")
    assert "still used by tenants" in await sluice("tiers", "delete", "standard", status=1)


async def test_a_model_is_created_changed_and_deleted(sluice) -> None:
    words = ("--base", BASE, "--pool", "cli-admin", "--release", "1", "--tenant", "cli-admin")
    (model,) = await as_json(sluice, "models", "create", "cli-admin/m", *words)
    assert (model["release"], model["owner_tenant_id"]) == ("1", "cli-admin")
    (same,) = await as_json(sluice, "models", "update", "cli-admin/m", "--pool", "cli-admin")
    assert same == model
    # What it stands for has changed, so its release has another name.
    (tuned,) = await as_json(sluice, "models", "update", "cli-admin/m", "--adapter", ADAPTER)
    assert (tuned["adapter_digest"], tuned["release"]) == (ADAPTER, f"{ADAPTER[:8]}-{BASE[:8]}")
    assert await as_json(sluice, "models", "show", "cli-admin/m") == tuned
    refused = await sluice("models", "forget", f"cli-admin/m@{tuned['release']}", status=1)
    assert "serves this release" in refused
    assert "deleted release cli-admin/m@1" in await sluice("models", "forget", "cli-admin/m@1")
    assert "deleted model" in await sluice("models", "delete", "cli-admin/m")
    assert "there is no models/cli-admin/m" in await sluice(
        "models", "show", "cli-admin/m", status=1
    )


async def test_bases_and_pools(sluice) -> None:
    (base,) = await as_json(
        sluice, "models", "base", "set", OTHER, "--context-tokens-max", "8", "--name", "b"
    )
    assert base == {"digest": OTHER, "name": "b", "context_tokens_max": 8}
    assert OTHER in await sluice("models", "base", "list")
    words = ("--base", OTHER, "--engine", "sim", "--replicas", "0", "--option", "slots=4")
    (pool,) = await as_json(sluice, "fleet", "pool", "create", "cli-pool", *words)
    assert (pool["engine_options"], pool["cell_replicas_max"]) == ({"slots": "4"}, 64)
    words = ("--cell-replicas", "2", "--prefill", "1", "--option", "slots=")
    (changed,) = await as_json(sluice, "fleet", "pool", "update", "cli-pool", *words)
    assert changed == pool | {
        "engine_options": {},
        "cell_replicas_max": 2,
        "roles": {"prefill": 1},
    }
    words = ("--memory-gib", "2", "--accelerators", "1", "--accelerator-gib", "80", "--dedicated")
    (needy,) = await as_json(sluice, "fleet", "pool", "update", "cli-pool", *words)
    gib = 1 << 30
    needs = {"memory_bytes": 2 * gib, "accelerators": 1, "accelerator_memory_bytes": 80 * gib}
    assert needy == changed | {"needs": needs | {"is_dedicated": True}}
    found = await as_json(sluice, "fleet", "pool", "show", "cli-pool")
    assert (found.pop("status")["placed"], found) == (0, needy)
    assert "cli-pool" in await sluice("fleet", "pools")
    assert "cli-pool-0" in await sluice("fleet", "cells")
    for view in ("replicas", "nodes", "routers"):
        assert isinstance(await as_json(sluice, "fleet", view), list)
    assert "still used by pools" in await sluice("models", "base", "delete", OTHER, status=1)
    assert "deleted pool" in await sluice("fleet", "pool", "delete", "cli-pool")
    assert "deleted base" in await sluice("models", "base", "delete", OTHER)


async def test_tenants_and_keys_are_shown_and_deleted(sluice) -> None:
    await sluice("tenants", "create", "cli-gone", "--rpm", "3")
    assert (await as_json(sluice, "tenants", "show", "cli-gone"))["limits"] == {"rpm": 3}
    assert "rpm=3" in await sluice("tenants", "show", "cli-gone")
    key = await as_json(sluice, "keys", "create", "cli-gone")
    shown = await as_json(sluice, "keys", "show", "cli-gone", key["id"])
    assert (shown["id"], "key" in shown) == (key["id"], False)
    assert "deleted tenant cli-gone" in await sluice("tenants", "delete", "cli-gone")
    assert "404" in await sluice("keys", "list", "cli-gone", status=1)


async def test_an_admin_key_is_created_used_rotated_and_revoked(sluice, monkeypatch) -> None:
    words = ("publisher", "--tenant", "cli-admin", "--name", "CI", "--expires", "90d")
    text = (await sluice("admin-keys", "create", *words)).splitlines()[-1]
    assert text.startswith("sk-sluice-admin-")
    (key,) = [k for k in await as_json(sluice, "admin-keys", "list") if k["name"] == "CI"]
    assert (key["role"], key["tenant_id"]) == ("publisher", "cli-admin")
    assert "UTC" in await sluice("admin-keys", "list")
    monkeypatch.setenv("SLUICE_ADMIN_KEY", text)
    own = ("models", "create", "cli-admin/ci", "--base", BASE, "--pool", "cli-admin")
    assert "cli-admin/ci" in await sluice(*own, "--tenant", "cli-admin")
    refused = await sluice("tenants", "create", "cli-no", status=1)
    assert "needs the role admin; your key is a publisher of tenant cli-admin" in refused
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)
    await sluice("models", "delete", "cli-admin/ci")
    rotated = await sluice("admin-keys", "rotate", key["id"], "--grace", "1h")
    assert f"{key['id']} works until 2" in rotated
    (off,) = await as_json(sluice, "admin-keys", "update", key["id"], "--disable")
    assert off["is_disabled"] is True
    assert (await as_json(sluice, "admin-keys", "show", key["id"])) == off
    assert "revoked" in await sluice("admin-keys", "revoke", key["id"])
    assert "need a tenant_id" in await sluice("admin-keys", "create", "publisher", status=1)
    assert "'king'" in await sluice("admin-keys", "create", "king", status=2)


async def test_the_audit_log(sluice) -> None:
    await sluice("tiers", "create", "cli-audited", "--rpm", "1")
    await sluice("tiers", "update", "cli-audited", "--rpm", "2")
    await sluice("tiers", "update", "cli-audited", "--reserved-percent", "0.1", "--rpm", "1")
    await sluice("tiers", "delete", "cli-audited")
    words = ("--kind", "tiers", "--object", "cli-audited", "--since", "1h")
    rows = await as_json(sluice, "audit", *words, "-n", "3", "--actor", "bootstrap")
    assert [row["action"] for row in rows] == ["delete", "replace", "replace"]
    shown = await sluice("audit", *words)
    assert "rpm: 1 -> 2" in shown
    assert "is neither like 2h" in await sluice("audit", "--since", "lately", status=2)


async def test_an_alert_is_acknowledged_silenced_and_its_incident_closed(
    sluice, shared_control_plane, eventually
) -> None:
    labels = {"alertname": "CliAlert", "severity": "P1", "pool": "cli-admin"}
    reports = "/v1/alertmanager/api/v2/alerts"
    answer = await shared_control_plane.admin.post(reports, json=[{"labels": labels}])
    assert answer.json() == {"new": 1}
    refused = await shared_control_plane.admin.post(reports, json=[{"labels": {"a": "b"}}])
    assert refused.status_code == 400
    assert "alertname" in refused.text
    found: list[dict[str, Any]] = []

    async def has_incident() -> bool:
        found[:] = await as_json(sluice, "alerts", "list", "--firing", "--name", "CliAlert")
        return bool(found[0]["incident_id"])

    await eventually(has_incident, "a page opens an incident")
    alert, incident = found[0]["id"], found[0]["incident_id"]
    await sluice("alerts", "acknowledge", alert, "--note", "mine")
    shown = await as_json(sluice, "alerts", "show", alert)
    assert (shown["acknowledged_by"], shown["note"]) == ("bootstrap", "mine")
    words = ("alerts", "silence", "alertname=CliAlert", "pool=~cli-.*", "--reason", "work")
    (silence,) = await as_json(sluice, *words, "--for", "30m")

    async def is_silenced() -> bool:
        return (await as_json(sluice, "alerts", "show", alert))["is_silenced"]

    await eventually(is_silenced, "the silence fits")
    await sluice("alerts", "unsilence", silence["id"])
    assert silence["id"] in await sluice("alerts", "silences")
    await sluice("incidents", "note", incident, "looks like a cable")
    await sluice("incidents", "close", incident, "it was the cable")
    told = await as_json(sluice, "incidents", "show", incident)
    assert [it["kind"] for it in told["events"]] == [
        *("opened", "alert", "acknowledged", "note", "closed")
    ]
    assert (told["is_open"], told["text"]) == (False, "it was the cable")
    assert incident in await sluice("incidents", "list", "--closed")
    again = await sluice("incidents", "close", incident, "twice", status=1)
    assert "closed already" in again
    assert await as_json(sluice, "alerts", "told") == []
    assert "there is no alerts/nothing" in await sluice("alerts", "show", "nothing", status=1)
    over = {"labels": labels, "endsAt": "2026-01-01T00:00:00Z"}
    await shared_control_plane.admin.post(reports, json=[over])
    assert await as_json(sluice, "alerts", "list", "--firing", "--name", "CliAlert") == []
    kinds = {row["kind"] for row in await as_json(sluice, "audit")}
    assert {"alerts", "alert-silences", "incidents"} <= kinds
