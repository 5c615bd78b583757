"""`sluice tenants, keys, models` against a real control plane."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from cli.app import app
from tests.integration.conftest import ADMIN_KEY

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

BASE = "5e" * 32
Sluice = Callable[..., Awaitable[str]]


@pytest_asyncio.fixture(loop_scope="session")
async def sluice(shared_control_plane, monkeypatch) -> Sluice:
    """Run a command; return what it says, errors included."""
    plane = shared_control_plane
    monkeypatch.setenv("SLUICE_ADMIN_URL", str(plane.admin.base_url))
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("COLUMNS", "200")
    await plane.put("tiers/standard", rpm=60)
    await plane.put(f"bases/{BASE}", context_tokens_max=64)
    await plane.put("pools/cli", base_digest=BASE, engine="sim", replicas_wanted=0)
    for model in ("cli-large", "cli-small"):
        await plane.put(f"models/{model}", base_digest=BASE, pool_id="cli", release="1")

    async def run(*words: str, status: int = 0) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, app, list(words))
        assert done.exit_code == status, (words, done.output)
        return done.output

    return run


async def one(sluice: Sluice, *words: str) -> dict[str, object]:
    """Return the one object that a command shows."""
    (found,) = json.loads(await sluice(*words, "--json"))
    return found


async def test_a_tenant_is_created_and_changed_a_little_at_a_time(sluice) -> None:
    tenant = await one(
        sluice, "tenants", "create", "cli", "--rpm", "9", "--fallback", "*=cli-small"
    )
    assert (tenant["tier_id"], tenant["name"], tenant["weight"]) == ("standard", "cli", 1)
    assert (tenant["limits"], tenant["fallbacks"]) == ({"rpm": 9}, {"*": "cli-small"})
    words = ("--weight", "3", "--tpm", "50", "--fallback", "cli-small=cli-large", "--disable")
    changed = await one(sluice, "tenants", "update", "cli", *words)
    assert changed == tenant | {
        "weight": 3,
        "is_disabled": True,
        "limits": {"rpm": 9, "tpm": 50},
        "fallbacks": {"*": "cli-small", "cli-small": "cli-large"},
    }
    words = ("--rpm", "0", "--fallback", "*=", "--enable", "--name", "CLI")
    changed = await one(sluice, "tenants", "update", "cli", *words)
    assert (changed["limits"], changed["fallbacks"]) == ({"tpm": 50}, {"cli-small": "cli-large"})
    assert (changed["is_disabled"], changed["name"], changed["weight"]) == (False, "CLI", 3)
    assert "cli-small=cli-large" in await sluice("tenants", "list")
    pinned = await one(sluice, "tenants", "pin", "cli", "cli-small", "cli-small@1")
    assert pinned == changed | {"pins": {"cli-small": "1"}}
    assert "no release cli-small@2" in await sluice(
        "tenants", "pin", "cli", "cli-small", "2", status=1
    )
    assert await one(sluice, "tenants", "unpin", "cli", "cli-small") == changed
    assert "has no pin" in await sluice("tenants", "unpin", "cli", "cli-small", status=1)
    assert "there is no tenants/nobody" in await sluice("tenants", "update", "nobody", status=1)
    refused = await sluice("tenants", "update", "cli", "--fallback", "x=cli-small", status=1)
    assert "no model, release or alias x" in refused
    assert "is not MODEL=OTHER" in await sluice(
        "tenants", "create", "y", "--fallback", "x", status=2
    )


async def test_a_key_is_created_changed_rotated_and_revoked(sluice) -> None:
    await sluice("tenants", "create", "cli-keys")
    words = ("--scope", "chat", "--scope", "models", "--model", "cli-*", "--rpm", "5")
    text = await sluice(
        "keys", "create", "cli-keys", *words, "--requests-max", "2", "--expires", "90d"
    )
    assert text.splitlines()[-1].startswith("sk-sluice-")
    key = await one(sluice, "keys", "list", "cli-keys")
    assert (key["scopes"], key["models"]) == (["chat", "models"], ["cli-*"])
    assert (key["rpm"], key["tpm"], key["requests_max"]) == (5, 0, 2)
    shown = await sluice("keys", "list", "cli-keys")
    assert "chat, models" in shown
    assert "UTC" in shown
    changed = await one(sluice, "keys", "update", "cli-keys", str(key["id"]), "--expires", "never")
    assert changed == key | {"expires_at_unix_ms": 0}
    rotated = await sluice("keys", "rotate", "cli-keys", str(key["id"]), "--grace", "1h")
    assert f"{key['id']} works until 2" in rotated
    assert rotated.splitlines()[-1].startswith("sk-sluice-")
    words = ("keys", "update", "cli-keys", str(key["id"]), "--disable")
    assert (await one(sluice, *words))["is_disabled"] is True
    assert "make a new one" in await sluice("keys", "rotate", "cli-keys", str(key["id"]), status=1)
    assert "revoked" in await sluice("keys", "revoke", "cli-keys", str(key["id"]))
    assert (await one(sluice, "keys", "list", "cli-keys"))["rpm"] == 5
    assert "is no duration" in await sluice(*words[:-1], "--expires", "soon", status=2)
    assert "'admin'" in await sluice("keys", "create", "cli-keys", "--scope", "admin", status=2)


async def test_aliases_and_releases(sluice) -> None:
    made = await one(sluice, "models", "alias", "set", "cli-best", "cli-large@1")
    assert made == {"id": "cli-best", "target": "cli-large@1", "owner_tenant_id": ""}
    await sluice("models", "alias", "set", "cli-best", "cli-large")
    assert "cli-best" in await sluice("models", "alias", "list")
    assert "no model or release" in await sluice("models", "alias", "set", "x", "none", status=1)
    assert (await one(sluice, "models", "releases", "cli-large"))["id"] == "cli-large@1"
    assert "cli-small@1" in await sluice("models", "releases")
    assert "removed cli-best" in await sluice("models", "alias", "remove", "cli-best")
    assert "404" in await sluice("models", "alias", "remove", "cli-best", status=1)
