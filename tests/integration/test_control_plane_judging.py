"""Judging answers in batches, by several control planes at once, on a real PostgreSQL."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.database import Database, DatabaseDownError
from control_plane.fleet import model
from control_plane.fleet.model import ReplicaState
from control_plane.quality import judging, repository, verdicts
from control_plane.quality.askings import Asking
from control_plane.quality.inbox import Inbox
from control_plane.quality.judging import Judge, judge_batch
from control_plane.quality.progress import Progress
from control_plane.quality.repository import AnswerReport
from control_plane.quality.tables import golden_answers, golden_truths, quarantines
from control_plane.quality.verdicts import Group, ReplacementBudget
from sluice.detector.consensus import Text

pytestmark = pytest.mark.real

BASE = "b" * 64
RIGHT, LIE = Text((1, 2, 3)), Text((1, 9, 3))


def asking(name: str, owner: str = "", expected: tuple[int, ...] = ()) -> Asking:
    prompt = name.split("/", maxsplit=1)[0]
    return Asking(name, prompt, "m", BASE, "", (1,), 4, 60, expected, owner)


DEFAULT = asking("default/b")
POOLS = ("p0", "p1")


class Site:
    """A database with pools of replicas, each on a node of its own."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def fill(self, pools: Mapping[str, int]) -> None:
        async def work(connection: AsyncConnection) -> None:
            base = {"digest": BASE, "name": "", "context_tokens_max": 100}
            await self._add(connection, tables.bases, [base])
            rows = [{"id": p, "base_digest": BASE, "engine": "sim"} for p in pools]
            await self._add(connection, tables.pools, rows)
            await self._add(connection, tables.cells, [{"id": p, "pool_id": p} for p in pools])
            names = [(p, f"{p}-{n:04}") for p, count in pools.items() for n in range(count)]
            await self._add(connection, tables.nodes, [{"id": f"node-{n}"} for _, n in names])
            state = int(ReplicaState.READY)
            rows = [
                {"id": n, "pool_id": p, "cell_id": p, "node_id": f"node-{n}", "state": state}
                for p, n in names
            ]
            await self._add(connection, tables.replicas, rows)

        await self.database.run(work)

    async def answer(
        self, askings: Iterable[Asking], texts: Mapping[str, Text], times: int = 1
    ) -> None:
        """Let replicas answer everything so many times, as their agents report it."""
        reports = [
            AnswerReport(f"node-{name}", name, one, text, "", 1000)
            for _ in range(times)
            for one in askings
            for name, text in texts.items()
        ]
        for start in range(0, len(reports), 1000):
            part = reports[start : start + 1000]
            await self.database.run(lambda connection, part=part: self._report(connection, part))

    async def count(self, condition: Any) -> int:
        query = select(func.count()).select_from(golden_answers).where(condition)
        return await self.database.run(lambda connection: connection.scalar(query)) or 0

    async def rows(self, query: Any) -> list[Any]:
        async def work(connection: AsyncConnection) -> list[Any]:
            return list((await connection.execute(query)).all())

        return await self.database.run(work)

    @staticmethod
    async def _report(connection: AsyncConnection, reports: Sequence[AnswerReport]) -> None:
        await repository.add_reports(connection, reports)

    @staticmethod
    async def _add(connection: AsyncConnection, table: Any, rows: list[dict[str, Any]]) -> None:
        if rows:
            await connection.execute(insert(table).values(rows))


@pytest_asyncio.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    database = Database(database_url)
    yield Site(database)
    await database.close()


def a_pool(liars: int, count: int, pool: str = "p0") -> dict[str, Text]:
    return {f"{pool}-{n:04}": LIE if n < liars else RIGHT for n in range(count)}


def known(askings: Iterable[Asking]) -> dict[str, Asking]:
    return {one.id: one for one in askings}


async def test_a_backlog_is_judged_in_bounded_batches(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(judging, "ROWS_MAX", 100)
    monkeypatch.setattr(judging, "_BATCHES_MAX", 3)
    await site.fill({"p0": 10})
    askings = [asking(f"golden_{n:02}/b", "acme") for n in range(30)] + [DEFAULT]
    await site.answer(askings, a_pool(1, 10), 2)
    judge = Judge(site.database, ReplacementBudget())
    seen: list[Group] = []
    while await site.count(~golden_answers.c.is_judged):
        outcomes = await judge.turn(known(askings))
        assert len(outcomes) <= 3
        for outcome in outcomes:
            assert len(outcome.judged) <= 100 // 30
            seen += outcome.judged
    assert seen[0] == ("p0", DEFAULT.id), "the platform's first"
    assert {group for group, many in Counter(seen).items()} == {("p0", a.id) for a in askings}
    taken = await site.rows(select(quarantines.c.replica_id, quarantines.c.prompt_id))
    assert [tuple(row) for row in taken] == [("p0-0000", "default")]


async def test_control_planes_judge_side_by_side_and_keep_the_limits_together(site: Site) -> None:
    await site.fill({"p0": 12, "p1": 12})
    askings = [DEFAULT, *(asking(f"golden_{n:02}/b") for n in range(20))]
    for pool in POOLS:
        await site.answer(askings, a_pool(5, 12, pool), 3)
    judges = [Judge(site.database, ReplacementBudget(pool_hour=2, node_day=3)) for _ in range(4)]
    while await site.count(~golden_answers.c.is_judged):
        await asyncio.gather(*(judge.turn(known(askings)) for judge in judges))
    taken = await site.rows(select(quarantines.c.pool_id, quarantines.c.replica_id))
    assert Counter(pool for pool, _ in taken) == {"p0": 4, "p1": 4}, "a third"
    assert len({replica for _, replica in taken}) == 8, "nobody twice"
    left = select(func.count()).where(~tables.replicas.c.is_draining)
    assert (await site.rows(left))[0][0] == 16


async def test_groups_claimed_by_another_control_plane_are_skipped(site: Site) -> None:
    await site.fill({"p0": 3})
    await site.answer([DEFAULT], a_pool(1, 3), 3)

    async def work(connection: AsyncConnection) -> None:
        assert len(await repository.claim(connection, (), 7)) == 7
        other = await site.database.run(lambda c: repository.claim(c, (), 100))
        assert len(other) == 2, "the rest, and nobody waits"

    await site.database.run(work)
    claimed = await site.database.run(lambda c: repository.claim(c, [("p0", DEFAULT.id)], 100))
    assert claimed == [], "groups that are left alone are"


async def test_a_failing_group_delays_no_other_and_is_parked(site: Site, monkeypatch) -> None:
    honest = verdicts.judge

    def judge_one(answers, truth, expected, **options):
        if expected == (666,):
            raise ZeroDivisionError("the group is bad")
        return honest(answers, truth, expected, **options)

    monkeypatch.setattr(verdicts, "judge", judge_one)
    now_s = 1000.0
    await site.fill({"p0": 4})
    bad = asking("aaa/b", expected=(666,))
    askings = known([bad, DEFAULT])
    await site.answer(askings.values(), a_pool(1, 4), 3)
    judge = Judge(site.database, ReplacementBudget(), lambda: now_s)
    failures = 0
    for _ in range(200):
        for outcome in await judge.turn(askings):
            failures += len(outcome.failures)
        now_s += 1.0
    assert (failures, judge.deferrals.parked) == (6, 1)
    taken = await site.rows(select(quarantines.c.replica_id))
    assert [row[0] for row in taken] == ["p0-0000"], "the other group was judged"
    assert await site.count(~golden_answers.c.is_judged) == 12, "kept for a better day"
    monkeypatch.setattr(verdicts, "judge", honest)
    now_s += 3600.0
    await judge.turn(askings)
    assert (await site.count(~golden_answers.c.is_judged), judge.deferrals.parked) == (0, 0)


async def test_a_group_that_takes_too_long_fails_alone(site: Site, monkeypatch) -> None:
    honest, is_over = verdicts.judge, threading.Event()

    def judge_one(answers, truth, expected, **options):
        if expected == (666,):
            is_over.wait()
        return honest(answers, truth, expected, **options)

    monkeypatch.setattr(verdicts, "judge", judge_one)
    monkeypatch.setattr(judging, "_DEADLINE_S", 2.0)
    monkeypatch.setattr(judging, "_GROUP_S", 0.3)
    await site.fill({"p0": 4})
    endless, other = asking("default/b", expected=(666,)), asking("golden_1/b")
    askings = known([endless, other])
    await site.answer(askings.values(), a_pool(1, 4), 3)
    judge = Judge(site.database, ReplacementBudget())
    try:
        async with asyncio.timeout(240):
            while ("p0", endless.id) not in judge.deferrals.waiting(0.0):
                with suppress(DatabaseDownError):
                    await judge.turn(askings)
            while await site.count(~golden_answers.c.is_judged) > 12:
                with suppress(DatabaseDownError):
                    await judge.turn(askings)
    finally:
        is_over.set()
    assert [row[0] for row in await site.rows(select(quarantines.c.prompt_id))] == ["golden_1"]


async def test_groups_beyond_the_time_limit_go_to_the_next_batch(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(judging, "_EXAMINE_S", 0.0)
    await site.fill({"p0": 3})
    askings = known([DEFAULT, asking("golden_1/b"), asking("golden_2/b")])
    await site.answer(askings.values(), a_pool(0, 3), 3)
    outcomes = await Judge(site.database, ReplacementBudget()).turn(askings)
    judged = [list(outcome.judged) for outcome in outcomes if outcome.judged]
    assert judged == [[("p0", name)] for name in askings]
    assert await site.count(~golden_answers.c.is_judged) == 0


async def test_a_failed_lesson_spoils_no_other_group(site: Site, monkeypatch) -> None:
    await site.fill({"p0": 3, "p1": 3})
    for pool in POOLS:
        await site.answer([DEFAULT], a_pool(0, 3, pool), 3)
    learn = repository.learn

    async def into_nowhere(connection, group, truth) -> None:
        await learn(connection, ("gone", group[1]) if group[0] == "p0" else group, truth)

    monkeypatch.setattr(repository, "learn", into_nowhere)
    outcome = await site.database.run(
        lambda connection: judge_batch(
            connection, known([DEFAULT]), (), ReplacementBudget(), Progress(time.monotonic, 60.0)
        )
    )
    assert set(outcome.failures) == {("p0", DEFAULT.id)}
    assert [tuple(row) for row in await site.rows(select(golden_truths.c.pool_id))] == [("p1",)]
    assert await site.count(~golden_answers.c.is_judged) == 9


async def test_the_budget_counts_recent_quarantines(site: Site) -> None:
    await site.fill({"p0": 9})
    await site.answer([DEFAULT], a_pool(2, 9), 3)
    budget = ReplacementBudget(pool_hour=1, node_day=3)

    async def judged() -> verdicts.Ruling:
        again = update(golden_answers).values(is_judged=False)
        await site.database.run(lambda connection: connection.execute(again))
        outcome = await site.database.run(
            lambda connection: judge_batch(
                connection, known([DEFAULT]), (), budget, Progress(time.monotonic, 60.0)
            )
        )
        return outcome.ruling

    async def age(hours: int) -> None:
        then = func.now() - func.make_interval(0, 0, 0, 0, hours)
        older = update(quarantines).values(created_at=then, node_id="node-p0-0001")
        await site.database.run(lambda connection: connection.execute(older))

    async def held() -> model.Holdback:
        return await site.database.run(lambda c: repository.holdback(c, budget))

    ruling = await judged()
    assert (len(ruling.quarantines), [one.budget for one in ruling.held]) == (2, ["pool"])
    assert (await held()).pools == {"p0": 1}
    await age(2)
    assert await held() == model.Holdback({}, frozenset())
    budget = ReplacementBudget(pool_hour=1, node_day=1)
    assert (await held()).nodes == {"node-p0-0001"}
    await age(25)
    assert await held() == model.Holdback({}, frozenset())


async def test_only_the_last_answers_are_kept(site: Site) -> None:
    await site.fill({"p0": 2, "p1": 1})
    await site.answer([DEFAULT, asking("golden_1/b")], {**a_pool(0, 2), **a_pool(0, 1, "p1")}, 7)
    assert await site.count(golden_answers.c.id > 0) == 2 * 3 * 3
    await site.database.run(lambda c: repository.prune(c, frozenset({DEFAULT.id})))
    assert await site.count(golden_answers.c.id > 0) == 3 * 3


async def test_an_answer_that_the_database_refuses_costs_no_other_one(site: Site) -> None:
    await site.fill({"p0": 5})
    dropped: list[str] = []
    inbox = Inbox(site.database, dropped.append)
    for name in ("p0-0000", "p0-0001", "x\0", "p0-0002", "y\0", "p0-0003", "p0-0004"):
        inbox.put(AnswerReport(f"node-{name}", name, DEFAULT, RIGHT, "", 1000))
    await inbox.write()
    assert (dropped, len(inbox.waiting)) == (["refused"] * 2, 0)
    assert await site.count(golden_answers.c.id > 0) == 5


async def test_answers_wait_in_their_order_for_a_database_that_is_away(
    site: Site, monkeypatch
) -> None:
    await site.fill({"p0": 3})
    inbox = Inbox(site.database, lambda _: None)
    names = ["p0-0000", "x\0", "p0-0001", "p0-0002"]
    for name in names:
        inbox.put(AnswerReport(f"node-{name}", name, DEFAULT, RIGHT, "", 1000))
    run, calls = site.database.run, 0

    async def run_twice(work):
        nonlocal calls
        calls += 1
        if calls > 2:
            raise DatabaseDownError("away")
        return await run(work)

    monkeypatch.setattr(site.database, "run", run_twice)
    with pytest.raises(DatabaseDownError):
        await inbox.write()
    assert [report.replica_id for report in inbox.waiting] == names
    monkeypatch.setattr(site.database, "run", run)
    await inbox.write()
    assert await site.count(golden_answers.c.id > 0) == 3
