"""Rows of scaling in PostgreSQL: the speeds that outlive a process, and replicas in the budget."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.database import Database
from control_plane.fleet.model import ReplicaState
from control_plane.scaling import repository
from control_plane.scaling.tables import pool_scalings, scaling_budgets
from control_plane.scaling.work import PoolSpeed

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

_SPEED = PoolSpeed(1e-4, 0.01, 16)
_KEY = ("ab" * 32, "H100", "default")


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Database]:
    database = Database(url)
    try:
        yield database
    finally:
        await database.close()


async def test_measured_speeds_outlive_the_process_that_stored_them(postgres_server) -> None:
    name = "scaling_speeds"
    await postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_server.template}")
    other = ("ab" * 32, "L4", "default")
    async with _opened(postgres_server.url(name)) as database:
        await database.run(lambda it: repository.write_speeds(it, {_KEY: PoolSpeed(1.0, 1.0, 1)}))
        await database.run(lambda it: repository.write_speeds(it, {_KEY: _SPEED}))
    async with _opened(postgres_server.url(name)) as database:
        found = await database.run(lambda it: repository.speeds(it, {_KEY, other}))
    assert found == {_KEY: _SPEED}, "other hardware has another speed"


async def _fill(connection: AsyncConnection) -> None:
    """Write a scaled pool and one that is sized by hand, each with replicas that drain."""
    digest, needs = "cd" * 32, {"accelerators": 2}
    await connection.execute(insert(tables.bases).values(digest=digest))
    for pool, wanted in (("scaled", 1), ("hand", 2)):
        values = {"id": pool, "base_digest": digest, "engine": "sim", "needs": needs}
        await connection.execute(insert(tables.pools).values(**values, replicas_wanted=wanted))
        await connection.execute(insert(tables.cells).values(id=f"{pool}-0", pool_id=pool))
    await connection.execute(insert(tables.nodes).values(id="n"))
    await connection.execute(insert(pool_scalings).values(pool_id="scaled", replicas_max=4))
    await connection.execute(insert(scaling_budgets).values(id="fleet", accelerators=20))
    rows = [
        ("scaled", ReplicaState.READY, False),
        ("scaled", ReplicaState.SLEEPING, False),
        ("scaled", ReplicaState.FAILED, False),
        ("scaled", ReplicaState.DRAINING, True),
        ("scaled", ReplicaState.READY, True),
        ("scaled", ReplicaState.LOST, True),
        ("hand", ReplicaState.READY, False),
        ("hand", ReplicaState.READY, True),
        ("hand", ReplicaState.LOST, False),
    ]
    for number, (pool, state, is_draining) in enumerate(rows):
        values = {"id": f"r{number}", "pool_id": pool, "cell_id": f"{pool}-0", "node_id": "n"}
        query = insert(tables.replicas).values(**values, state=int(state), is_draining=is_draining)
        await connection.execute(query)


async def test_replicas_that_drain_use_the_budget_and_lost_ones_do_not(postgres_server) -> None:
    name = "scaling_rows"
    await postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_server.template}")
    async with _opened(postgres_server.url(name)) as database:
        await database.run(_fill)
        (pool,) = await database.run(lambda it: repository.scaled_pools(it, 30.0))
        left = await database.run(lambda it: repository.budget(it, ["scaled"]))
    sight = pool.sight
    assert (sight.ready, sight.booting, sight.placed, sight.leaving) == (1, 1, 3, 2)
    assert sight.waking == 1, "it has been told to wake"
    assert left.accelerators == 20 - 2 * (2 + 1), "two wanted by hand, and one that drains"
