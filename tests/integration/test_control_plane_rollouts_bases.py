"""A release with another base: capacity first, then requests, whoever is killed meanwhile."""

import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest

from tests.integration.rollout_site import (
    BASE,
    LONG,
    NEW,
    OLD,
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

NEXT_BASE = "d9" * 32
SERVING = 2  # replicas of the old base
DEADLINE_S = 90.0
_DEMAND = "SELECT replicas FROM pool_demands WHERE pool_id = 'next' AND model_id = 'm'"
_REPLICAS = "SELECT count(*) FROM replicas WHERE pool_id = 'next' AND NOT is_draining"
_LACKING = "SELECT count(*) FROM gateway_confirmations WHERE missing_bases <> '{}'"
_GET_READY = """
UPDATE replicas SET state = 2, profile = 'embed' WHERE id IN (
SELECT id FROM replicas WHERE pool_id = 'next' AND state <> 2 AND NOT is_draining LIMIT $1)
"""


async def test_replicas_of_the_new_base_come_first_and_the_surplus_goes(
    database_url, start_control_plane, tmp_path: Path, eventually
) -> None:
    database = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        async with AsyncExitStack() as stack:
            telemetry = await stack.enter_async_context(running_telemetry())

            async def start():
                found = start_control_plane(database_url, tmp_path, **telemetry.environment)
                return await stack.enter_async_context(found)

            first = await start()
            await make_fleet(first)
            await _make_bases(first)
            rollout = await begin(first, "m", plan=SHORT)
            await eventually(
                _shows(database, _REPLICAS, 2), "one that serves a tenth, and one more"
            )
            assert await database.fetchval(_DEMAND) == 2

            last = await start()
            gateway = await stack.enter_async_context(running_gateway(last.grpc_address))
            os.kill(first.child.pid, signal.SIGKILL)
            await _is_stepped(database, rollout, eventually)
            assert (await shown(last, rollout))["share_percent"] == 0, "nothing serves it yet"
            await _goes_on_beside_a_locked_pool(database, last, eventually)
            gateway.missing = [NEXT_BASE]
            await eventually(_shows(database, _LACKING, 1), "the gateway has said so")
            await database.execute(_GET_READY, 1)
            await _is_held(last, rollout, eventually)
            gateway.missing = []
            opens = reaches(last, rollout, share_percent=10)
            await eventually(opens, "what it needs is there", DEADLINE_S)

            await eventually(
                _shows(database, _DEMAND, SERVING + 1), "it asks for the last stage", DEADLINE_S
            )
            await eventually(
                _shows(database, _REPLICAS, SERVING + 1), "which is prepared", DEADLINE_S
            )
            second = await start()
            gateway_of_second = await stack.enter_async_context(
                running_gateway(second.grpc_address)
            )
            os.kill(last.child.pid, signal.SIGKILL)
            await _is_stepped(database, rollout, eventually)
            found = await shown(second, rollout)
            assert (found["stage"], found["share_percent"], found["wanted_stage"]) == (0, 10, 1)
            assert max(gateway.shares) == 1000, "gateways have not heard of more"
            await database.execute(_GET_READY, SERVING)
            over = reaches(second, rollout, phase="done", is_live=False)
            await eventually(over, "it takes over", DEADLINE_S)

            await _is_told(gateway_of_second.watcher, eventually)
            await _is_given_back(database, eventually)
    finally:
        await database.close()


def _shows(database, query: str, wanted: object):
    async def check() -> bool:
        return await database.fetchval(query) == wanted

    return check


async def _is_held(plane, rollout: str, eventually) -> None:
    """The fleet is ready, a gateway is not: the share does not grow, and everybody can see why."""
    reason = f"gateway-1 has not loaded the files of base {NEXT_BASE[:12]}"

    async def check() -> bool:
        found = await shown(plane, rollout)
        assert (found["share_percent"], found["stage"]) == (0, -1)
        return found["waiting_for"].startswith(reason)  # a step that had begun says the one before

    await eventually(check, "it is stepped, and says why it waits", DEADLINE_S)


async def _is_told(watcher, eventually) -> None:
    await eventually(lambda: watcher.state.models["m"].pool_id == "next", "gateways are told")


async def _is_given_back(database, eventually) -> None:
    """Nothing is left of what the rollout had asked for, and the old pool goes."""
    pool = "SELECT (replicas_wanted, rollout_replicas) FROM pools WHERE id = 'next'"
    assert await database.fetchval(pool) == (SERVING, None)
    assert await database.fetchval("SELECT count(*) FROM pool_demands") == 0
    await eventually(_shows(database, _REPLICAS, SERVING), "the surplus one goes", DEADLINE_S)
    # Nothing stands for the old pool any more, and its time is over.
    await database.execute("DELETE FROM models WHERE id = 'other'")
    await database.execute("UPDATE pools SET retire_at = now() WHERE id = 'main'")
    old = "SELECT replicas_wanted FROM pools WHERE id = 'main'"
    await eventually(_shows(database, old, 0), "the old pool is given up", DEADLINE_S)


async def _make_bases(plane) -> None:
    """Model `m`: `old` in pool `main`, with two replicas; `new` in pool `next`, with none."""
    await plane.put("pools/main", base_digest=BASE, engine="sim", replicas_wanted=SERVING)
    await plane.put(f"bases/{NEXT_BASE}", context_tokens_max=64)
    await plane.put("pools/next", base_digest=NEXT_BASE, engine="sim", replicas_wanted=0)
    for base, pool, adapter, release in (
        (NEXT_BASE, "next", NEW, "new"),
        (BASE, "main", OLD, "old"),
    ):
        body = {"base_digest": base, "pool_id": pool, "adapter_digest": adapter}
        await plane.put("models/m", **body, release=release)
    await make_model(plane, "other")


async def _is_stepped(database, rollout: str, eventually) -> None:
    """Wait until one that lives has stepped it, and again.

    Where the machine stalls, it may have done so before the other one was killed.
    """
    query = "SELECT taken_at FROM rollouts WHERE id = $1"
    seen: set[object] = set()

    async def is_stepped() -> bool:
        seen.add(await database.fetchval(query, rollout))
        return len(seen) > 3

    await eventually(is_stepped, "one that lives steps it", DEADLINE_S)


async def _goes_on_beside_a_locked_pool(database, plane, eventually) -> None:
    """Steps of one rollout that wait for a lock do not keep those of another one."""
    async with database.transaction():
        await database.execute("SELECT FROM pools WHERE id = 'next' FOR UPDATE")
        other = await begin(plane, "other", plan=LONG)

        async def is_watched() -> bool:
            return (await shown(plane, other))["sample"] >= 1000

        await eventually(is_watched, "another one goes on", DEADLINE_S)
    assert (await plane.admin.post(f"/v1/rollouts/{other}/abort")).status_code == 200
    await eventually(reaches(plane, other, is_live=False), "it is over", DEADLINE_S)
