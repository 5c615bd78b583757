"""Budgets on a real PostgreSQL: written, compared with the ledger, told to gateways."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import select, update

from control_plane.budgets import repository
from control_plane.budgets.feed import Ledger
from control_plane.budgets.model import Period, Span, Usage, span_at
from control_plane.budgets.repository import Due, Reading
from control_plane.budgets.service import Budgets
from control_plane.budgets.tables import budget_states, budgets
from control_plane.database import Database
from control_plane.rollouts.feed import FeedDownError
from control_plane.rollouts.repository import clock_ms
from control_plane.tables import budget_stops, tenants, tiers
from gateway.limits.budgets import BudgetExhaustedError
from gateway.limits.budgets import Budgets as GatewayBudgets
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


async def test_what_is_refused(plane) -> None:
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
    for answer in (
        await plane.admin.get(hidden, headers=headers),
        await plane.admin.put(f"{BUDGETS}/seen", json=DAILY, headers=headers),
        await plane.admin.delete(f"{BUDGETS}/seen", headers=headers),
    ):
        assert answer.status_code == 403, answer.text


async def test_gateways_stop_who_used_it_up_until_there_is_more(plane, eventually) -> None:
    made = await plane.put(f"{TENANT}/budgets/stop", **DAILY)
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "budgets")
    gateway = GatewayBudgets(watcher.state)

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
        self.asked: list[tuple[Span, list[str]]] = []

    async def usage(
        self, span: Span, tenant_ids: Collection[str], models: Collection[str]
    ) -> Ledger:
        assert set(models) <= {"m"}
        self.asked.append((span, sorted(tenant_ids)))
        if self.usage_of is None:
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
    ledger, shown, counted = Spoken(), [], []
    first, second = (
        Budgets(database, ledger, lambda *told: shown.append(told), counted.append, 3600)
        for _ in range(2)
    )
    ledger.usage_of = {("a", "m"): Usage(1, 9), ("a", "n"): Usage(1, 1), ("b", "x"): Usage(1, 8)}
    await first.step()
    assert sorted(asked for _, asked in ledger.asked) == [["a"], ["a", "b"]]
    await second.step()
    assert shown[-1] == ({}, 0.0), "the other one leads"
    await first.step()
    assert shown[-1][0] == {"exhausted": 1, "soft": 2}
    assert len(ledger.asked) == 2, "nothing is due"
    assert sorted(counted) == ["exhausted", "soft", "soft"]
    assert await database.run(_stops) == [("a", ["d"])]
    # The period ends while the ledger is away: the stop carries its end itself.
    ledger.usage_of = None
    await database.run(_end_periods)
    with pytest.raises(FeedDownError):
        await first.step()
    assert shown[-1][0] == {"unknown": 3}
    assert await database.run(_stops) == [("a", ["d"])]
    ledger.usage_of = {}
    await first.step()
    assert await database.run(_stops) == [], "a new period opens it"


async def _stops(connection: Any) -> list[tuple[str, list[str]]]:
    rows = (await connection.execute(select(budget_stops))).all()
    return [(row.id, [stop["name"] for stop in row.stops]) for row in rows]


async def _end_periods(connection: Any) -> None:
    now_ms = await clock_ms(connection)
    await connection.execute(update(budget_states).values(ends_at_unix_ms=now_ms))
