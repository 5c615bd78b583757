"""The fleet gets ready for a rollout, and settles after it: rows of a real database."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from sqlalchemy import text

from control_plane.database import Database
from control_plane.fleet.preparation import (
    PreparedRelease,
    abandon,
    is_ready,
    prepare,
    retire_pools,
    settle,
)

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

OLD_BASE, NEW_BASE, ADAPTER = "a1" * 32, "a2" * 32, "a3" * 32
CONTROL = PreparedRelease("m", "one", OLD_BASE, "", "old")
CANARY = PreparedRelease("m", "two", NEW_BASE, "", "new")
TUNED = PreparedRelease("m", "tuned", OLD_BASE, ADAPTER, "old")
READY = 2


@pytest_asyncio.fixture(loop_scope="session")
async def database(database_url: str) -> AsyncIterator[Database]:
    """Model `m`, served by four replicas of pool `old`; pool `new` has another base."""
    found = Database(database_url)
    await execute(
        found,
        f"INSERT INTO bases (digest) VALUES ('{OLD_BASE}'), ('{NEW_BASE}')",
        "INSERT INTO pools (id, base_digest, engine, replicas_wanted) "
        f"VALUES ('old', '{OLD_BASE}', 'sim', 4), ('new', '{NEW_BASE}', 'sim', 0)",
        "INSERT INTO cells (id, pool_id, router_id) VALUES ('old-0', 'old', 'r'), ('new-0', 'new', 'r')",
        "INSERT INTO nodes (id) VALUES ('n0'), ('n1'), ('n2')",
        "INSERT INTO models (id, base_digest, release, created_at_unix_s, pool_id) "
        f"VALUES ('m', '{OLD_BASE}', 'one', 0, 'old')",
        "INSERT INTO releases (id, model_id, base_digest, pool_id) "
        f"VALUES ('m@one', 'm', '{OLD_BASE}', 'old'), ('m@two', 'm', '{NEW_BASE}', 'new')",
        *(replica("old", number) for number in range(2)),
    )
    yield found
    await found.close()


def replica(pool: str, number: int) -> str:
    return (
        "INSERT INTO replicas (id, pool_id, cell_id, node_id, state, profile) VALUES "
        f"('{pool}{number}', '{pool}', '{pool}-0', 'n{number}', {READY}, 'frames')"
    )


async def execute(database: Database, *statements: str) -> None:
    async def work(connection) -> None:
        for statement in statements:
            await connection.execute(text(statement))

    await database.run(work)


async def wanted(database: Database, pool: str) -> tuple[int, int | None]:
    """What operators and rollouts want of a pool."""
    query = text(f"SELECT replicas_wanted, rollout_replicas FROM pools WHERE id = '{pool}'")

    async def work(connection) -> tuple[int, int | None]:
        return tuple((await connection.execute(query)).one())

    return await database.run(work)


async def retire(database: Database) -> list[str]:
    """Let the time pass after which pools are given up, and look."""
    for table, moment in (("pools", "retire_at"), ("pool_demands", "ends_at")):
        await execute(database, f"UPDATE {table} SET {moment} = now() WHERE {moment} IS NOT NULL")
    return await database.run(retire_pools)


async def test_another_base_gets_replicas_and_takes_over(database: Database) -> None:
    async def ready(share: int) -> bool:
        return await database.run(lambda c: is_ready(c, CONTROL, CANARY, share))

    async def ask(share: int) -> tuple[int, int | None]:
        for _ in range(2):  # doing it again changes nothing
            await database.run(lambda c: prepare(c, CONTROL, CANARY, share))
        return await wanted(database, "new")

    assert await ask(100) == (0, 2)
    assert not await ready(100)
    await execute(database, replica("new", 0))
    assert await ready(100), "the surplus one is not waited for"
    await execute(database, "UPDATE cells SET router_id = '' WHERE id = 'new-0'")
    assert not await ready(100), "nobody reaches it"
    await execute(database, "UPDATE cells SET router_id = 'r' WHERE id = 'new-0'")
    assert await ask(5000) == (0, 3)
    assert not await ready(5000)
    await execute(database, "UPDATE pools SET replicas_wanted = 6 WHERE id = 'old'")
    assert await ask(10_000) == (0, 7), "an operator scaled what serves now"
    assert await wanted(database, "old") == (6, None), "which keeps its replicas"
    await execute(
        database,
        f"UPDATE models SET base_digest = '{NEW_BASE}', release = 'two', pool_id = 'new'",
        "INSERT INTO tiers (id) VALUES ('t')",
        "INSERT INTO tenants (id, tier_id, cache_salt, weight, pins) "
        """VALUES ('late', 't', '', 1, '{"m": "one"}'), ('other', 't', '', 1, '{}')""",
    )
    for _ in range(2):
        await database.run(lambda c: settle(c, CANARY, CONTROL))
    assert await wanted(database, "new") == (6, None)
    assert await wanted(database, "old") == (6, None), "requests may still be on their way"
    assert await retire(database) == [], "a tenant is pinned to it"
    await execute(database, "UPDATE tenants SET pins = '{}'")
    assert await retire(database) == ["old"]
    assert await wanted(database, "old") == (0, None)
    assert await retire(database) == []


async def test_a_rolled_back_preparation_is_given_up(database: Database) -> None:
    await database.run(lambda c: prepare(c, CONTROL, CANARY, 1000))
    await database.run(lambda c: settle(c, CONTROL, CANARY))
    assert await wanted(database, "new") == (0, 2), "not before all gateways know"
    assert await retire(database) == ["new"]
    assert (await wanted(database, "new"), await wanted(database, "old")) == ((0, None), (4, None))
    # One that never got so far asks for nothing.
    await execute(database, "UPDATE pools SET replicas_wanted = 3 WHERE id = 'new'")
    await database.run(lambda c: settle(c, CONTROL, CANARY))
    assert await retire(database) == []


async def test_an_adapter_is_ready_where_it_lies_on_all_nodes(database: Database) -> None:
    async def ready() -> bool:
        return await database.run(lambda c: is_ready(c, CONTROL, TUNED, 1000))

    await database.run(lambda c: prepare(c, CONTROL, TUNED, 1000))
    assert await wanted(database, "old") == (4, None)
    assert await ready(), "no node says what it holds"
    held = "INSERT INTO node_artifacts (node_id, digest) VALUES "
    await execute(
        database, held + f"('n0', '{OLD_BASE}'), ('n0', '{ADAPTER}'), ('n1', '{OLD_BASE}')"
    )
    assert not await ready()
    await execute(database, held + f"('n1', '{ADAPTER}')")
    assert await ready()


async def test_rollouts_into_one_pool_leave_each_other_alone(database: Database) -> None:
    other = replace(CONTROL, model_id="x"), replace(CANARY, model_id="x")
    await execute(
        database,
        "INSERT INTO models (id, base_digest, release, created_at_unix_s, pool_id) VALUES "
        f"('x', '{OLD_BASE}', 'one', 0, 'old'), ('user', '{NEW_BASE}', '', 0, 'new')",
        "UPDATE pools SET replicas_wanted = 1 WHERE id = 'new'",
    )
    await database.run(lambda c: prepare(c, CONTROL, CANARY, 5000))
    assert await wanted(database, "new") == (1, 4), "one for who is there, and three"
    await execute(database, *(replica("new", number) for number in range(3)))
    await database.run(lambda c: prepare(c, *other, 100))
    assert await wanted(database, "new") == (1, 6)
    assert await database.run(lambda c: is_ready(c, CONTROL, CANARY, 5000)), "it was there before"
    assert not await database.run(lambda c: is_ready(c, *other, 100)), "there are not enough yet"
    await database.run(lambda c: settle(c, other[0], other[1]))
    assert await retire(database) == [], "others use the pool"
    assert await wanted(database, "new") == (1, 4), "only what was rolled back has gone"
    await execute(
        database,
        "INSERT INTO releases (id, model_id, base_digest, pool_id) "
        f"VALUES ('m@three', 'm', '{NEW_BASE}', 'old'), ('x@one', 'x', '{OLD_BASE}', 'old')",
        f"UPDATE models SET base_digest = '{NEW_BASE}', release = 'two', pool_id = 'new' "
        "WHERE id = 'm'",
    )
    for _ in range(2):
        await database.run(lambda c: settle(c, CANARY, CONTROL))
    assert await wanted(database, "new") == (4, None), "no sum of both"
    assert await retire(database) == []
    assert await wanted(database, "old") == (4, None), "another model stands for it"
    query = text("SELECT id, pool_id FROM releases")
    found = await database.run(lambda c: c.execute(query))
    assert dict(found.all()) == {
        "m@one": "old",
        "m@two": "new",
        "m@three": "new",
        "x@one": "old",
    }


async def test_a_release_that_is_not_there_any_more_leaves_no_demand(database: Database) -> None:
    await database.run(lambda c: prepare(c, CONTROL, CANARY, 10_000))
    await execute(database, "DELETE FROM releases WHERE id = 'm@two'")
    for _ in range(2):
        await database.run(lambda c: abandon(c, "m"))
    assert await wanted(database, "new") == (0, 5), "not before all gateways know"
    assert await retire(database) == [], "operators may want something of the pool"
    assert (await wanted(database, "new"), await wanted(database, "old")) == ((0, None), (4, None))

    # Or it has taken over, and what it took over from is not there any more.
    await database.run(lambda c: prepare(c, CONTROL, CANARY, 10_000))
    await execute(
        database,
        "DELETE FROM releases WHERE id = 'm@one'",
        f"UPDATE models SET base_digest = '{NEW_BASE}', release = 'two', pool_id = 'new'",
    )
    for _ in range(2):
        await database.run(lambda c: abandon(c, "m"))
    assert await wanted(database, "new") == (4, None), "what serves the model stays"
