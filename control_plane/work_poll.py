"""One statement per second, which tells the periodic loops whether they may have work.

Most loops have no work in most rounds. A separate transaction for each of these rounds would be
most of the processor time of an idle control plane.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog
from sqlalchemy import ColumnElement, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database, DatabaseDownError

log = structlog.get_logger(__name__)

_INTERVAL_S = 1.0
_DEADLINE_S = 4.0

MayHaveWork = Callable[[], bool]


def unknown() -> bool:
    """Return that there may be work, for loops without a poll."""
    return True


class WorkPoll:
    """The newest answers to the conditions of all loops. `run` must be started in a TaskGroup.

    Before the first answer, and while PostgreSQL does not answer, every loop may have work. Each
    loop then reads its own rows, and handles the failure in its own way.
    """

    def __init__(self, database: Database, conditions: Mapping[str, ColumnElement[bool]]) -> None:
        """Create the poll. `conditions` has the condition under which each loop has work."""
        self._database = database
        self._names = tuple(conditions)
        self._query: Any = select(
            *(condition.label(name) for name, condition in conditions.items())
        )
        self._idle: frozenset[str] = frozenset()

    def of(self, name: str) -> MayHaveWork:
        """Return a function that tells whether a loop may have work.

        The answer is at most as old as an interval and a query.
        """
        assert name in self._names, f"no condition for {name}"
        return partial(self._may_have_work, name)

    def _may_have_work(self, name: str) -> bool:
        return name not in self._idle

    async def run(self) -> None:
        """Read the conditions until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(_INTERVAL_S)

    async def step(self) -> None:
        """Read the conditions once."""
        try:
            answers = await self._database.run_singly(self._read, deadline_s=_DEADLINE_S)
        except (DatabaseDownError, DBAPIError) as error:
            if self._idle:
                log.warning("query_of_work_failed", error=str(getattr(error, "reason", error)))
            self._idle = frozenset()
        else:
            self._idle = frozenset(name for name, has_work in answers.items() if not has_work)

    async def _read(self, connection: AsyncConnection) -> dict[str, bool]:
        row = (await connection.execute(self._query)).one()
        return dict(zip(self._names, row, strict=True))
