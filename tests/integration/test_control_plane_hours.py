"""Replica-hours on real PostgreSQL: written with every change, ended where a node was last seen."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.database import Database
from control_plane.fleet import repository
from control_plane.fleet.hours import HOUR_US, ReplicaCounts, buckets, rows
from control_plane.fleet.hours_repository import edges, prune_intervals
from control_plane.fleet.hours_tables import replica_intervals
from control_plane.fleet.model import Replica, ReplicaState
from sluice.engines import profile_of

pytestmark = pytest.mark.real
_T = replica_intervals.c


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A pool with a cell, and two nodes."""
    found = Database(database_url)

    async def fill(connection: AsyncConnection) -> None:
        await connection.execute(insert(tables.bases).values(digest="d"))
        await connection.execute(
            insert(tables.pools).values(id="p", base_digest="d", engine="sim", replicas_wanted=1)
        )
        await connection.execute(insert(tables.cells).values([{"id": "p-0", "pool_id": "p"}]))
        nodes = [{"id": "n1", "region": "north"}, {"id": "n2", "region": "south"}]
        await connection.execute(insert(tables.nodes).values(nodes))

    await found.run(fill)
    yield found
    await found.close()


async def _run(database: Database, work: Any, *args: Any, **kwargs: Any) -> Any:
    return await database.run(lambda connection: work(connection, *args, **kwargs))


async def _intervals(database: Database) -> list[Any]:
    query = select(_T.replica_id, _T.is_running, _T.began_at, _T.ended_at).order_by(_T.id)
    return list(await database.run(lambda it: it.execute(query)))


async def _create(database: Database, *replicas: Replica) -> None:
    await _run(database, repository.create_replicas, replicas, {"p": profile_of("sim")})


async def _seen(database: Database, node_id: str, **values: Any) -> None:
    """As `write_node` does."""
    query = update(tables.nodes).where(tables.nodes.c.id == node_id)
    await database.run(lambda it: it.execute(query.values(seen_at=func.now(), **values)))


async def _says(database: Database, replica: Replica, state: ReplicaState) -> None:
    await _seen(database, replica.node_id)
    known = Replica(replica.id, "p", "p-0", replica.node_id, state=state)
    await _run(database, repository.write_observed, [known], {})


async def test_intervals_follow_one_another_and_end_with_the_replica(database) -> None:
    one = Replica("r1", "p", "p-0", "n1", accelerators=(0, 3))
    await _create(database, one)
    for state in (ReplicaState.READY, ReplicaState.READY, ReplicaState.DRAINING):
        await _says(database, one, state)
    await _says(database, one, ReplicaState.FAILED)
    await _says(database, one, ReplicaState.STOPPED)
    found = await _intervals(database)
    assert [it.is_running for it in found] == [False, True, True, False]
    assert all(before.ended_at == after.began_at for before, after in pairwise(found))
    assert found[-1].ended_at is not None
    await _run(database, repository.forget_replicas, ["r1"])
    assert await _intervals(database) == found, "what has ended does not end again"


async def test_a_lost_node_was_paid_until_it_was_last_seen_and_again_when_it_is_back(
    database,
) -> None:
    one, two = (Replica(f"r{n}", "p", "p-0", f"n{n}") for n in (1, 2))
    await _create(database, one, two)
    for replica in (one, two):
        await _says(database, replica, ReplicaState.READY)
    query = select(tables.nodes.c.seen_at).where(tables.nodes.c.id == "n1")
    seen_at = await database.run(lambda it: it.scalar(query))
    await _seen(database, "n2", region="west")
    assert await _run(database, repository.lose_nodes, -1.0) == ["n1", "n2"]  # at once
    ended = {it.replica_id: it.ended_at for it in await _intervals(database)}
    assert ended["r1"] == seen_at
    assert ended["r2"] > seen_at, "n2 was seen later"
    assert await _run(database, repository.lose_nodes, -1.0) == []
    await _seen(database, "n1", is_lost=False)
    await _says(database, one, ReplicaState.READY)
    last = (await _intervals(database))[-1]
    assert (last.replica_id, last.ended_at) == ("r1", None)
    assert last.began_at > ended["r1"], "between them nobody knows of it"


async def test_hours_of_a_deleted_pool_are_kept_and_counted_by_hour(database) -> None:
    await _create(
        database,
        Replica("r1", "p", "p-0", "n1", accelerators=(0, 1)),
        Replica("r2", "p", "p-0", "n2"),
    )
    began = datetime.now(UTC) - timedelta(hours=2.5)
    await database.run(lambda it: it.execute(update(replica_intervals).values(began_at=began)))
    await _seen(database, "n1")
    await _seen(database, "n2")
    open_until = await database.run(lambda it: it.scalar(select(func.min(tables.nodes.c.seen_at))))
    delete_pool = tables.pools.delete().where(tables.pools.c.id == "p")
    begin, end = (
        int(it.timestamp() * 1e6) for it in (began, datetime.now(UTC) + timedelta(hours=1))
    )

    async def held(group: str, *, are_hours: bool) -> list[Any]:
        parts = buckets((begin, end), are_hours=are_hours)
        width = HOUR_US if are_hours else 10**16
        found = await _run(database, edges, group, (begin, end), width)
        return rows(found, parts)

    before = await held("node_id", are_hours=False)
    assert [row.name for row in before] == ["n1", "n2"]
    assert before[0].held.reserved == int(open_until.timestamp() * 1e6) - begin
    await database.run(lambda it: it.execute(delete_pool))
    assert await held("node_id", are_hours=False) == before, "and what was told stays told"
    hours = await held("pool_id", are_hours=True)
    assert len(hours) in (3, 4)
    total = ReplicaCounts()
    for row in hours:
        assert row.held.reserved <= 2 * HOUR_US
        total = total.plus(row.held)
    (whole,) = await held("pool_id", are_hours=False)
    assert total == whole.held
    assert total.accelerators == 2 * before[0].held.reserved
    assert total.unassigned == before[1].held.reserved


async def test_nothing_is_counted_twice_when_a_step_runs_again_and_old_ones_go(database) -> None:
    one = Replica("r1", "p", "p-0", "n1")

    async def fails(connection: AsyncConnection) -> None:
        await repository.create_replicas(connection, [one], {"p": profile_of("sim")})
        raise ZeroDivisionError  # a leader that is killed before it commits

    with pytest.raises(ZeroDivisionError):
        await database.run(fails)
    assert await _intervals(database) == []
    await _create(database, one)
    await _says(database, one, ReplicaState.READY)
    await _run(database, prune_intervals, kept_days=1)
    assert len(await _intervals(database)) == 2
    long_ago = datetime.now(UTC) - timedelta(days=3)
    values = {"began_at": long_ago - timedelta(days=9), "ended_at": long_ago}
    closed = update(replica_intervals).where(_T.ended_at.is_not(None)).values(**values)
    await database.run(lambda it: it.execute(closed))
    await _run(database, prune_intervals, kept_days=1)
    assert [it.ended_at for it in await _intervals(database)] == [None]


@pytest.mark.asyncio(loop_scope="session")
async def test_hours_come_in_pages_and_wrong_questions_are_told(shared_control_plane) -> None:
    plane = shared_control_plane
    query = {"from": "2026-01-01T00:00:00Z", "limit": 1}

    async def get(**changes: Any) -> Any:
        return await plane.admin.get("/v1/replica-hours", params=query | changes)

    wrong = (
        ({"by": "cell"}, "by"),
        ({"from": "yesterday"}, "from"),
        ({"to": "2025-12-31T00:00:00Z"}, "from"),
        ({"from": "2020-01-01T00:00:00Z"}, "from"),
        ({"limit": 10_001}, "limit"),
    )
    for changes, param in wrong:
        answer = await get(**changes)
        assert (answer.status_code, param in answer.json()["detail"]) == (400, True), answer.text
    moving = await plane.admin.get("/v1/replica-hours", params={"after": "1/p"})
    assert (moving.status_code, "from" in moving.json()["detail"]) == (400, True), moving.text
    names: list[str] = []
    after = ""
    while True:
        found = (await get(by="node", after=after)).json()
        names += [row["name"] for row in found["data"]]
        if not found["has_more"]:
            break
        after = found["data"][-1]["id"]
    whole = (await get(by="node", limit=10_000)).json()
    assert names == [row["name"] for row in whole["data"]]
