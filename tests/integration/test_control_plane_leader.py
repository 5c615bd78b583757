"""One control plane decides about the fleet; one that freezes while it does is not waited for."""

import os
import signal
from pathlib import Path

import asyncpg
import pytest

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
        async with start_control_plane(database_url, tmp_path) as leader:
            await leader.put(f"bases/{DIGEST}", context_tokens_max=64)
            await _freeze_while_it_leads(database, leader.child.pid, eventually)
            async with start_control_plane(database_url, tmp_path) as other:
                await database.execute("INSERT INTO nodes (id, engines) VALUES ('n', '{sim}')")
                await other.put("pools/p", base_digest=DIGEST, engine="sim", replicas_wanted=1)

                async def is_made() -> bool:
                    return await database.fetchval("SELECT count(*) FROM replicas") == 1

                await eventually(is_made, "the other one decides", 60)
                os.kill(leader.child.pid, signal.SIGCONT)
                await eventually(leader.is_ready, "it wakes up", 60)
                # What it began was undone; it goes on, beside the other one or after it.
                await leader.put("pools/p", base_digest=DIGEST, engine="sim", replicas_wanted=2)

                async def are_two() -> bool:
                    return await database.fetchval("SELECT count(*) FROM replicas") == 2

                await eventually(are_two, "and one of them decides", 60)
    finally:
        await database.close()


async def _freeze_while_it_leads(database, leader: int, eventually) -> None:
    """Stop it while it waits for a table of which it reads every row once it has its lock."""
    blocking = database.transaction()
    await blocking.start()
    await database.execute("SET LOCAL lock_timeout = '60s'")
    await database.execute("LOCK TABLE cells IN ACCESS EXCLUSIVE MODE")

    async def waits() -> bool:
        return await database.fetchval(_WAITERS) > 0

    await eventually(waits, "the leader reads the cells", 60)
    os.kill(leader, signal.SIGSTOP)
    await blocking.rollback()
