"""One control plane decides about the fleet; one that freezes while it does is not waited for."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DIGEST = "1e" * 32
_WAITERS = """
SELECT count(*) FROM pg_locks WHERE relation = 'cells'::regclass AND NOT granted
"""


@pytest.mark.timeout(300)
async def test_a_frozen_leader_is_replaced(
    database_url: str, start_control_plane, tmp_path: Path, eventually
) -> None:
    """It holds its lock in an open transaction, which PostgreSQL ends when nothing comes of it."""
    database = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        async with (
            start_control_plane(database_url, tmp_path) as leader,
            _running_router(leader.grpc_address),
        ):
            await leader.put(f"bases/{DIGEST}", context_tokens_max=64)
            # What writes down that the router is there holds its row until the step ends.
            is_here = "SELECT count(*) FROM routers WHERE id = 'router'"
            await eventually(_is(database, is_here, 1), "the router is known")
            await _freeze_while_it_leads(database, leader.child.pid, eventually)
            frozen_at = await database.fetchval("SELECT clock_timestamp()")
            async with (
                start_control_plane(database_url, tmp_path) as other,
                _running_router(other.grpc_address),
            ):
                await database.execute("INSERT INTO nodes (id, engines) VALUES ('n', '{sim}')")
                await other.put("pools/p", base_digest=DIGEST, engine="sim", replicas_wanted=1)

                count = "SELECT count(*) FROM replicas"
                await eventually(_is(database, count, 1), "the other one decides", 60)

                async def is_heard() -> bool:
                    query = "SELECT seen_at > $1 FROM routers WHERE id = 'router'"
                    return await database.fetchval(query, frozen_at)

                await eventually(is_heard, "and writes down who is there", 60)
                os.kill(leader.child.pid, signal.SIGCONT)
                await eventually(leader.is_ready, "it wakes up", 60)
                # What it began was undone; it goes on, beside the other one or after it.
                await leader.put("pools/p", base_digest=DIGEST, engine="sim", replicas_wanted=2)
                await eventually(_is(database, count, 2), "and one of them decides", 60)
    finally:
        await database.close()


def _is(database, query: str, wanted: int):
    async def check() -> bool:
        return await database.fetchval(query) == wanted

    return check


@asynccontextmanager
async def _running_router(address: str) -> AsyncIterator[None]:
    """A router as control planes see it: one that watches."""
    watcher = ControlWatcher(address, wire.ROLE_ROUTER, "router", "127.0.0.1:1")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        try:
            yield
        finally:
            running.cancel()


async def _freeze_while_it_leads(database, leader: int, eventually) -> None:
    """Stop it while it waits for a table of which it reads every row once it has its lock."""

    async def waits() -> bool:
        return await database.fetchval(_WAITERS) > 0

    for _ in range(10):
        blocking = database.transaction()
        await blocking.start()
        await database.execute("SET LOCAL lock_timeout = '60s'")
        await database.execute("LOCK TABLE cells IN ACCESS EXCLUSIVE MODE")
        await eventually(waits, "the leader reads the cells", 60)
        os.kill(leader, signal.SIGSTOP)
        is_leading = await waits()  # it waits for 4 s only: this one may have stalled as long
        await blocking.rollback()
        if is_leading:
            return
        os.kill(leader, signal.SIGCONT)
    raise AssertionError("its turn was over each time before it was stopped")
