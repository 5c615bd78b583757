"""`sluice explain` with a real control plane and a real router."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from cli.app import app
from tests.integration.conftest import ADMIN_KEY
from tests.integration.test_control_plane_cells import running_router

pytestmark = pytest.mark.real

BASE = "ce" * 32


async def sluice(*words: str):
    """Run the command in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["explain", *words])


async def test_the_routers_are_found_and_asked(control_plane, eventually, tmp_path, monkeypatch):
    await control_plane.put("tiers/gold", priority=7, ttft_deadline_ms=5000, reserved_percent=10)
    await control_plane.put("tenants/acme", name="Acme", tier_id="gold", weight=2)
    await control_plane.put(f"bases/{BASE}", name="tiny", context_tokens_max=2048)
    await control_plane.put("pools/main", base_digest=BASE, engine="sim", replicas_wanted=0)
    await control_plane.put("models/org/tiny:1", base_digest=BASE, pool_id="main")
    monkeypatch.setenv("SLUICE_ADMIN_URL", str(control_plane.admin.base_url))
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)
    shown = await sluice("gone")
    assert (shown.exit_code, "no router owns a cell" in shown.stderr) == (1, True)

    async with running_router("router-e", control_plane.grpc_address, tmp_path):
        shown = None

        async def is_asked() -> bool:
            nonlocal shown
            words = ("--model", "org/tiny:1", "--tenant", "acme", "--prompt-tokens", "9", "--json")
            shown = await sluice(*words)
            return shown.exit_code == 0 and json.loads(shown.stdout)[0]["state"] == "admitted"

        await eventually(is_asked, "a router owns the cell and answers for it")
        [answer] = json.loads(shown.stdout)
        assert (answer["router_id"], answer["cell_id"]) == ("router-e", "main-0")
        assert (answer["chosen"], answer["reason"]) == ("", "its cell has no replicas")
        assert 29_000 < answer["deadline_left_ms"] <= 30_000, "a tier's is for admission only"
        shown = await sluice("gone")
        assert (shown.exit_code, "no router knows request gone" in shown.stderr) == (1, True)
