"""Replicas of a pool with roles sleep without a role, and wake into the role that needs them."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import PostgresServer
from tests.integration.obedient_agent import node
from tests.integration.reporting_router import reporting
from tests.integration.scaling_cli import scaling_command

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DIGEST = "6e" * 32
BOUNDS = {"replicas_max": 8, "hold_s": 60.0, "minute_worth": 0.0, "sleepers_min": 1}
POOL = {
    "base_digest": DIGEST,
    "engine": "sim",
    "replicas_wanted": 2,
    "roles": {"prefill": 1, "decode": 1},
}


async def test_a_sleeper_wakes_into_either_role_and_a_pool_with_roles_rests_as_a_whole(
    postgres_server: PostgresServer,
    eventually: Callable[..., Awaitable[None]],
    start_control_plane: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, interval_s = "role_sleep", "0.5"
    await postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_server.template}")
    settings = {"CONTROL_PLANE__SCALING_INTERVAL_S": interval_s}
    async with (
        start_control_plane(postgres_server.url(name), tmp_path, **settings) as plane,
        node(plane, "node-r", "sim"),
        reporting(plane.grpc_address, "router-r") as router,
    ):
        sluice = scaling_command(plane, monkeypatch)
        await plane.put(f"bases/{DIGEST}", context_tokens_max=2048)
        await plane.put("pools/rest", **POOL)
        await plane.put("pools/rest/scaling", **BOUNDS, replicas_min=2)
        router.demand["rest-0"], router.prompts["rest-0"] = 0.4, 4000.0

        async def found() -> Counter[tuple[str, str]]:
            answer = await plane.admin.get("/v1/replicas", params={"pool_id": "rest"})
            rows = [row for row in answer.json()["data"] if not row["is_draining"]]
            return Counter((row["role"], row["state"]) for row in rows)

        async def has(*, asleep: int = 0, **wanted: int) -> bool:
            kinds = {(role, "ready"): count for role, count in wanted.items()}
            return await found() == Counter(kinds | {("", "sleeping"): asleep})

        await eventually(lambda: has(prefill=1, decode=1, asleep=1), "one sleeps without a role")
        assert "a sleeper wakes into either role" in await sluice("explain", "rest")
        # The prefill replica has most of the work, so the queue waits for it.
        router.prompts["rest-0"] = 9000.0
        router.queued["rest-0"], router.queued_tokens["rest-0"] = 1, 200_000

        async def prefills() -> bool:
            return (await found())["prefill", "ready"] >= 2

        await eventually(prefills, "the sleeper prefills")
        changes = json.loads(await sluice("history", "rest", "--json"))
        assert ("prefill", "wake") in {(row["role"], row["cause"]) for row in changes}

        del router.queued["rest-0"], router.queued_tokens["rest-0"]
        router.demand["rest-0"] = router.prompts["rest-0"] = 0.0
        rests = BOUNDS | {"replicas_min": 0, "hold_s": 1.0, "idle_s": 1.0, "sleepers_min": 2}
        await plane.put("pools/rest/scaling", **rests)
        await eventually(lambda: has(asleep=2), "a pool without requests rests")
        router.requests["rest-0"] += 5.0
        router.queued["rest-0"] = 40

        async def wakes() -> bool:
            ready = await found()
            return min(ready["prefill", "ready"], ready["decode", "ready"]) >= 1

        await eventually(wakes, "the first requests wake replicas for both roles")
