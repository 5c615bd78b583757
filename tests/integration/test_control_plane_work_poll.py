"""The poll of the loops' work on a real PostgreSQL."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from control_plane.app import work_conditions
from control_plane.database import Database, DatabaseDownError
from control_plane.work_poll import WorkPoll

pytestmark = pytest.mark.real

NAMES = ("alerts", "batches", "budgets", "rollouts", "scaling", "uploads")


async def test_a_loop_has_work_once_its_rows_exist(control_plane, database_url: str) -> None:
    plane, database = control_plane, Database(database_url)
    try:
        poll = WorkPoll(database, work_conditions())
        assert all(poll.of(name)() for name in NAMES), "nothing is known before the first answer"
        await poll.step()
        assert not any(poll.of(name)() for name in NAMES)
        await plane.put("tiers/polled")
        await plane.put("tenants/polled", tier_id="polled")
        budget = "/v1/tenants/polled/budgets/daily"
        answer = await plane.admin.put(budget, json={"amount": 1, "period": "day"})
        assert answer.is_success, answer.text
        await poll.step()
        assert [name for name in NAMES if poll.of(name)()] == ["budgets"]
    finally:
        await database.close()


class NoDatabase:
    """A database that answers as often as it is told, and then no more."""

    def __init__(self, answers: int = 0) -> None:
        self.left = answers
        self.transactions = 0

    async def run_singly(self, _: Callable[..., Awaitable[Any]], **__: float) -> dict[str, bool]:
        self.transactions += 1
        if self.left == 0:
            raise DatabaseDownError("it is down")
        self.left -= 1
        return dict.fromkeys(NAMES, False)


async def test_without_an_answer_each_loop_may_have_work() -> None:
    database: Any = NoDatabase(answers=1)
    poll = WorkPoll(database, work_conditions())
    await poll.step()
    assert not poll.of("scaling")()
    await poll.step()
    assert all(poll.of(name)() for name in NAMES)
