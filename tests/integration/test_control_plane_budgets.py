"""Budgets on a real PostgreSQL: written, compared with the ledger, told to gateways."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.budgets import repository
from control_plane.budgets.feed import Ledger
from control_plane.budgets.model import BudgetSpan, Period, Usage, span_at
from control_plane.budgets.repository import Due, Reading
from control_plane.budgets.service import BudgetService
from control_plane.budgets.tables import budget_states, budgets
from control_plane.database import Database
from control_plane.rollouts.repository import clock_ms
from control_plane.tables import budget_stops, tenants, tiers
from control_plane.telemetry_client import FeedDownError
from gateway.limits.budgets import BudgetChecks, BudgetExhaustedError
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

TENANT = "tenants/budgets-of"
BUDGETS = f"/v1/{TENANT}/budgets"
DAILY = {"amount": 1000, "period": "day"}


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane) -> Any:
    await shared_control_plane.put("tiers/budgets")
    for tenant in ("budgets-of", "budgets-other"):
        await shared_control_plane.put(f"tenants/{tenant}", tier_id="budgets")
    return shared_control_plane


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    database = Database(url)
    try:
        yield database
    finally:
        await database.close()


async def listed(plane: Any, **query: str) -> dict[str, Any]:
    answer = await plane.admin.get("/v1/budgets", params={"tenant_id": "budgets-of"} | query)
    assert answer.status_code == 200, answer.text
    return {row["name"]: row for row in answer.json()["data"]}


async def test_a_budget_is_written_once_shown_and_removed(plane) -> None:
    one = f"{BUDGETS}/rest"
    key = {"Idempotency-Key": "budgets-rest"}
    made = await plane.admin.put(one, json=DAILY, headers=key)
    assert made.status_code == 201, made.text
    again = await plane.admin.put(one, json=DAILY, headers=key)
    assert (again.json(), again.headers["Idempotency-Replayed"]) == (made.json(), "true")
    read = await plane.admin.get(one)
    assert read.json() == made.json()
    assert read.headers["ETag"] == made.headers["ETag"]
    assert DAILY.items() <= read.json().items()
    tag = {"If-Match": read.headers["ETag"]}
    larger = await plane.admin.put(one, json=DAILY | {"amount": 2000}, headers=tag)
    assert (larger.status_code, larger.json()["id"]) == (200, made.json()["id"])
    assert (await plane.admin.put(one, json=DAILY, headers=tag)).status_code == 412
    assert (await listed(plane))["rest"]["state"] == "unknown"
    assert "rest" in await listed(plane, state="unknown")
    assert "rest" not in await listed(plane, state="exhausted")
    query = {"kind": "budgets", "object_id": "budgets-of/rest"}
    rows = (await plane.admin.get("/v1/audit", params=query)).json()["data"]
    assert [row["action"] for row in rows] == ["replace", "create"]
    assert [row["after"]["amount"] for row in rows] == [2000, 1000]
    assert (await plane.admin.delete(one)).status_code == 204
    assert (await plane.admin.get(one)).status_code == 404
    assert (await plane.admin.delete(one)).status_code == 404


async def test_invalid_budgets_are_refused(plane) -> None:
    put = plane.admin.put
    for path, body, status, param in (
        (f"{BUDGETS}/x", DAILY | {"model_id": "none-such"}, 400, "model_id"),
        (f"{BUDGETS}/x", DAILY | {"amount": 0}, 400, "amount"),
        ("/v1/tenants/budgets-none/budgets/x", DAILY, 404, None),
        (f"{BUDGETS}/a%20b", DAILY, 400, "name"),
    ):
        answer = await put(path, json=body)
        assert (answer.status_code, answer.json().get("param")) == (status, param), answer.text
    answer = await plane.admin.get("/v1/budgets", params={"state": "empty"})
    assert (answer.status_code, answer.json()["param"]) == (400, "state")
    many = "/v1/tenants/budgets-other/budgets"
    statuses = [(await put(f"{many}/{number}", json=DAILY)).status_code for number in range(17)]
    assert statuses == [201] * 16 + [409]


async def test_a_publisher_sees_its_own_budgets_alone_and_writes_none(plane) -> None:
    await plane.put("tenants/budgets-other/budgets/0", **DAILY)
    await plane.put(f"{TENANT}/budgets/seen", **DAILY)
    body = {"role": "publisher", "tenant_id": "budgets-of"}
    key = (await plane.admin.post("/v1/admin-keys", json=body)).json()["key"]
    headers = {"Authorization": f"Bearer {key}"}
    found = (await plane.admin.get("/v1/budgets", headers=headers)).json()["data"]
    assert {row["tenant_id"] for row in found} == {"budgets-of"}
    assert (await plane.admin.get(f"{BUDGETS}/seen", headers=headers)).status_code == 200
    hidden = "/v1/tenants/budgets-other/budgets/0"
    assert (await plane.admin.get(hidden, headers=headers)).status_code == 404
    for answer in (
        await plane.admin.put(f"{BUDGETS}/seen", json=DAILY, headers=headers),
        await plane.admin.delete(f"{BUDGETS}/seen", headers=headers),
    ):
        assert answer.status_code == 403, answer.text


async def test_gateways_stop_an_exhausted_tenant_until_its_budget_grows(plane, eventually) -> None:
    made = await plane.put(f"{TENANT}/budgets/stop", **DAILY)
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "budgets")
    gateway = BudgetChecks(watcher.state)

    def is_let_in() -> bool:
        try:
            gateway.require("budgets-of", "m")
        except BudgetExhaustedError:
            return False
        return True

    async with (
        opened(plane.spec.env["CONTROL_PLANE__DATABASE_URL"]) as database,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(watcher.run())
        assert await watcher.wait_synced(20)

        now_ms = await database.run(clock_ms)

        async def says(tokens: int, *, later_ms: int) -> None:
            """Let the ledger say what was used, so long after the first time."""
            due = Due(str(made["id"]), "budgets-of", "", Period.DAY)
            span, usage = span_at(Period.DAY, now_ms), Usage(1, tokens, tokens // 2, 0)
            reading = Reading(due, span, usage, now_ms + later_ms, now_ms - 2000)
            await database.run(lambda it: repository.write_readings(it, [reading]))

        await says(999, later_ms=0)
        found = (await listed(plane))["stop"]
        assert (found["state"], found["used"], found["reached_percent"]) == ("soft", 999, 80)
        assert found["stop_delay_s"] == 17.0, "the ledger lagged by 2 s; it is asked every 15 s"
        assert is_let_in()
        await says(1000, later_ms=1)
        await eventually(lambda: not is_let_in(), "the gateway stops it")
        assert "stop" in await listed(plane, state="exhausted")
        await says(10, later_ms=0)  # an older reading that comes late
        assert (await listed(plane))["stop"]["used"] == 1000
        await says(900, later_ms=2)  # a correction
        await eventually(is_let_in, "less usage opens it")
        await says(1500, later_ms=3)
        await eventually(lambda: not is_let_in(), "the gateway stops it again")
        for opening in (
            {"amount": 1501},
            {"on_exhausted": "alert"},
            {"cached_percent": 0},
            {"unit": "requests"},
            {"period": "month"},  # of which nothing is known yet
        ):
            await plane.put(f"{TENANT}/budgets/stop", **DAILY | opening)
            await eventually(is_let_in, f"{opening} opens it")
            await plane.put(f"{TENANT}/budgets/stop", **DAILY)
            if "period" not in opening:
                await eventually(lambda: not is_let_in(), "the gateway stops it again")
        await says(1000, later_ms=4)
        await eventually(lambda: not is_let_in(), "the gateway stops it again")
        assert (await plane.admin.delete(f"{BUDGETS}/stop")).status_code == 204
        await eventually(is_let_in, "without the budget it goes on")
        running.cancel()


class Spoken:
    """A ledger that says what the test wants, or is away."""

    def __init__(self) -> None:
        self.usage_of: dict[tuple[str, str], Usage] | None = {}
        self.asked: list[tuple[BudgetSpan, list[str]]] = []
        self.sums_days_only = False
        self.tells_tenants_max = 500
        self.now_s, self.takes_s = 0.0, 0.0

    def clock(self) -> float:
        return self.now_s

    async def usage(
        self, span: BudgetSpan, tenant_ids: Collection[str], models: Collection[str]
    ) -> Ledger:
        assert set(models) <= {"m"}
        self.asked.append((span, sorted(tenant_ids)))
        self.now_s += self.takes_s
        is_month = span.end_ms - span.start_ms > 86_400_000
        is_much = len(tenant_ids) > self.tells_tenants_max
        if self.usage_of is None or is_much or (self.sums_days_only and is_month):
            raise FeedDownError("away")
        return Ledger(self.usage_of, 1)


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with opened(database_url) as found:
        yield found


@pytest.mark.asyncio(loop_scope="function")
async def test_one_control_plane_follows_the_ledger_and_keeps_states_without_it(
    database: Database,
) -> None:
    async def seed(connection: Any) -> None:
        await connection.execute(tiers.insert().values(id="s"))
        tenant = {"tier_id": "s", "cache_salt": b"1", "weight": 1}
        await connection.execute(tenants.insert().values([{"id": it, **tenant} for it in "abc"]))
        row = {"unit": "tokens", "amount": 10, "on_exhausted": "stop", "soft_percents": [80]}
        day, month = ({**row, "model_id": "", "period": period} for period in ("day", "month"))
        rows = [
            day | {"id": "1", "tenant_id": "a", "name": "d"},
            month | {"id": "2", "tenant_id": "a", "name": "m", "model_id": "m"},
            month | {"id": "3", "tenant_id": "b", "name": "m"},
        ]
        await connection.execute(budgets.insert().values(rows))

    await database.run(seed)
    ledger, shown = Spoken(), []
    first, second = (
        BudgetService(database, ledger, shown.append, 3600, ledger.clock) for _ in range(2)
    )
    ledger.usage_of = {("a", "m"): Usage(1, 9), ("a", "n"): Usage(1, 1), ("b", "x"): Usage(1, 8)}
    await first.step()
    assert sorted(asked for _, asked in ledger.asked) == [["a"], ["a", "b"]]
    await second.step()
    assert shown[-1] == repository.NOTHING, "the other one leads"
    await first.step()
    assert shown[-1].states == shown[-1].recent == {"exhausted": 1, "soft": 2}
    assert len(ledger.asked) == 2, "nothing is due"
    assert await database.run(_stops) == [("a", ["d"])]
    # The period ends while the ledger is away: the stop carries its end itself.
    ledger.usage_of = None
    await database.run(_end_periods)
    await first.step()
    assert shown[-1].states == {"unknown": 3}
    assert await database.run(_stops) == [("a", ["d"])]
    ledger.usage_of = {}
    await first.step()
    assert await database.run(_stops) == [("a", ["d"])], "it rests after a failure"
    ledger.now_s += 1
    await first.step()
    assert await database.run(_stops) == [], "a new period opens it"


async def _stops(connection: Any) -> list[tuple[str, list[str]]]:
    rows = (await connection.execute(select(budget_stops))).all()
    return [(row.id, [stop["name"] for stop in row.stops]) for row in rows]


async def _end_periods(connection: Any) -> None:
    now_ms = await clock_ms(connection)
    await connection.execute(update(budget_states).values(ends_at_unix_ms=now_ms))


@pytest.mark.asyncio(loop_scope="function")
async def test_a_writer_waiting_for_a_tenants_budgets_sees_the_other_write(
    database: Database, eventually: Callable[..., Awaitable[None]]
) -> None:
    await database.run(_one_budget)
    holds, writes = asyncio.Event(), asyncio.Event()

    async def tick(connection: AsyncConnection) -> None:
        await repository.lock(connection, ["a"])
        holds.set()
        await writes.wait()
        await repository.write_readings(connection, [await _reading(connection, 10)])

    async with asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(database.run(tick))
        await holds.wait()
        waiting = tasks.create_task(database.run(lambda it: repository.lock(it, ["a"])))
        await eventually(lambda: database.run(_waits), "it waits for the rows")
        writes.set()
        await ticking
        (row,) = await waiting
    assert row["state"] == "exhausted"


async def _one_budget(connection: AsyncConnection) -> None:
    await connection.execute(tiers.insert().values(id="s"))
    tenant = {"id": "a", "tier_id": "s", "cache_salt": b"1", "weight": 1}
    await connection.execute(tenants.insert().values(tenant))
    row = {"unit": "tokens", "amount": 10, "period": "day", "on_exhausted": "stop"}
    row |= {"id": "1", "tenant_id": "a", "name": "d", "soft_percents": [50, 90]}
    await connection.execute(budgets.insert().values(row))


async def _reading(connection: AsyncConnection, tokens: int, *, days: int = 0) -> Reading:
    now_ms = await clock_ms(connection)
    span = span_at(Period.DAY, now_ms + days * 86_400_000)
    return Reading(Due("1", "a", "", Period.DAY), span, Usage(1, tokens), now_ms, 1)


async def _waits(connection: AsyncConnection) -> bool:
    query = """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'
    )
    """
    return bool(await connection.scalar(text(query)))


@pytest.mark.asyncio(loop_scope="function")
async def test_each_soft_percent_is_told_and_each_period_anew(database: Database) -> None:
    await database.run(_one_budget)

    async def told(tokens: int, *, days: int = 0) -> list[tuple[str, int]]:
        async def work(connection: AsyncConnection) -> list[repository.BudgetChange]:
            reading = await _reading(connection, tokens, days=days)
            return await repository.write_readings(connection, [reading])

        return [(str(it.state), it.reached_percent) for it in await database.run(work)]

    assert await told(5) == [("soft", 50)]
    assert await told(8) == []
    assert await told(9) == [("soft", 90)]
    assert await told(8) == [], "a correction reaches nothing"
    assert await told(9, days=1) == [("soft", 90)]
    assert await told(10, days=1) == [("exhausted", 90)]
    assert await told(10, days=2) == [("exhausted", 90)]
    assert await told(0, days=3) == [("ok", 0)]
    assert await told(0, days=4) == [], "nothing again"


@pytest.mark.asyncio(loop_scope="function")
async def test_failing_sums_do_not_delay_the_others(database: Database) -> None:
    async def seed(connection: AsyncConnection) -> None:
        await _one_budget(connection)
        row = {"unit": "tokens", "amount": 10, "period": "month", "on_exhausted": "stop"}
        row |= {"tenant_id": "a", "soft_percents": []}
        many = [row | {"id": f"m{number}", "name": f"m{number}"} for number in range(9)]
        await connection.execute(budgets.insert().values(many))

    await database.run(seed)
    ledger, shown = Spoken(), []
    loop = BudgetService(database, ledger, shown.append, 3600, ledger.clock)
    ledger.sums_days_only, ledger.usage_of = True, {("a", "m"): Usage(1, 10)}
    await loop.step()
    assert await database.run(_stops) == [("a", ["d"])]
    assert len(ledger.asked) == 2


@pytest.mark.asyncio(loop_scope="function")
async def test_failed_sums_come_last_and_in_smaller_queries(database: Database) -> None:
    def asked(failed: dict[str, int], count_max: int) -> Any:
        async def work(connection: AsyncConnection) -> list[str]:
            due = await repository.due(connection, Period.DAY, 15.0, count_max, failed)
            return [one.id for one in due]

        return database.run(work)

    async def seed(connection: AsyncConnection) -> None:
        await _one_budget(connection)
        tenant = {"tier_id": "s", "cache_salt": b"1", "weight": 1}
        row = {"unit": "tokens", "amount": 10, "period": "day", "on_exhausted": "stop"}
        row |= {"name": "d", "soft_percents": []}
        await connection.execute(tenants.insert().values([{"id": it, **tenant} for it in "bcd"]))
        rows = [row | {"id": str(at), "tenant_id": it} for at, it in enumerate("bcd", 2)]
        await connection.execute(budgets.insert().values(rows))

    await database.run(seed)
    assert await asked({}, 3) == ["1", "2", "3"]
    assert await asked({"1": 9, "2": 8, "gone": 7}, 3) == ["3", "4", "2"]
    ledger = Spoken()
    loop = BudgetService(database, ledger, lambda _: None, 3600, ledger.clock)
    ledger.tells_tenants_max, ledger.usage_of = 1, {(it, "m"): Usage(1, 10) for it in "abcd"}
    for _ in range(40):
        await loop.step()
        ledger.now_s += 15
    assert {tenant_id for tenant_id, _ in await database.run(_stops)} == set("abcd")


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("answers", [True, False])
async def test_a_leader_that_pauses_keeps_its_lease(database: Database, answers: bool) -> None:
    await database.run(_one_budget)
    ledger, shown = Spoken(), []
    ledger.takes_s, ledger.usage_of = 10.0, {} if answers else None
    first, second = (
        BudgetService(database, ledger, shown.append, 0, ledger.clock) for _ in range(2)
    )
    await first.step()
    for passed_s in range(39):
        assert await first.step() <= 1.0, passed_s
        ledger.now_s += 1
        await database.run(_age_lease)
        await second.step()
        assert shown[-1] == repository.NOTHING
    assert len(ledger.asked) == 1
    ledger.now_s += 1
    await first.step()
    assert len(ledger.asked) == 2


async def _age_lease(connection: AsyncConnection) -> None:
    """Let a second of the lease pass, as on the ledger's clock."""
    await connection.execute(text("UPDATE leases SET expires_at = expires_at - interval '1 s'"))
