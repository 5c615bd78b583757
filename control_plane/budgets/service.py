"""The loop of budgets, which reads usage from the ledger and stores the resulting states.

Every control plane runs the loop, but only the leader, which has the lease, does the work. If the
leader is silent for half a minute, another control plane acquires the lease. The rows depend only
on the ledger, so a step that runs twice or concurrently does no harm. The process has only the
times of the next queries in memory.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.budgets import repository
from control_plane.budgets.feed import ASKED_MAX, Ledger, UsageFeed
from control_plane.budgets.model import BudgetSpan, Period, Usage, span_at
from control_plane.budgets.repository import NOTHING, Due, Reading, Summary
from control_plane.database import Database, DatabaseDownError
from control_plane.rollouts.repository import clock_ms
from control_plane.telemetry_client import FeedDownError
from control_plane.work_poll import MayHaveWork, unknown
from sluice.ids import new_id
from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_LEASE = "budgets"
_LEASE_S = 30.0  # lease in seconds, longer than a tick and a query of the ledger together
# pause after a query as a multiple of its duration, so that queries run at most a fifth of the time
_REST = 4.0
_RETRY_MAX_S = 15.0
# An answer increases the next query by this number of budgets, so that queries grow slowly.
_GROWTH = 32


@dataclass(slots=True)
class BudgetPace:
    """Controls the number of budgets per query to the ledger, and the time of the next query. Pure.

    The ledger may be too slow for a query, so a failure halves the number of budgets. Times are
    seconds of one clock.
    """

    asked_max: int = ASKED_MAX
    rests_until_s: float = 0.0
    failures: int = 0
    is_behind: bool = False  # whether the last query was full, so that more budgets may be due
    # Unix milliseconds of failed attempts, by budget id
    tried: dict[str, int] = field(default_factory=dict[str, int])

    def took(self, due: Sequence[Due]) -> None:
        """Record the budgets that are due.

        If there are fewer than `asked_max`, no further budgets are due.
        """
        self.is_behind = len(due) == self.asked_max
        if not self.is_behind:  # all due budgets are known, so others are dropped
            self.tried = {one.id: self.tried[one.id] for one in due if one.id in self.tried}

    def answered(self, now_s: float, took_s: float) -> None:
        """Record an answer of the ledger."""
        self.failures = 0
        self.asked_max = min(ASKED_MAX, self.asked_max + _GROWTH)
        self.rests_until_s = now_s + took_s * _REST

    def failed(self, now_s: float, took_s: float) -> None:
        """Record a failure of the ledger."""
        pause_s = backoff_s(self.failures, first_s=_TICK_S, max_s=_RETRY_MAX_S)
        self.failures += 1
        self.asked_max = max(1, self.asked_max // 2)
        self.rests_until_s = now_s + max(pause_s, took_s * _REST)


class BudgetService:
    """Owns the loop of budgets."""

    def __init__(
        self,
        database: Database,
        ledger: UsageFeed,
        show: Callable[[Summary], None],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        may_have_work: MayHaveWork = unknown,
    ) -> None:
        """Create the loop. `run` must be started in a TaskGroup.

        Args:
            database: Database of budgets.
            ledger: Source of usage. While the source is down, states do not change.
            show: Called with the summary for metrics. The summary is empty while another control
                plane leads.
            interval_s: Seconds between two queries of a budget's usage.
            clock: Returns monotonic seconds.
            may_have_work: Tells whether there may be budgets.
        """
        self._database = database
        self._may_have_work = may_have_work
        self._ledger = ledger
        self._show = show
        self._interval_s = interval_s
        self._clock = clock
        self._process = new_id("budgets")
        self._leads_until_s = 0.0
        self._paces = {period: BudgetPace() for period in Period}

    async def run(self) -> None:
        """Run the loop until cancelled."""
        while True:
            pause_s = _TICK_S
            try:
                if self._may_have_work():
                    pause_s = await self.step()
                else:
                    self._show(NOTHING)
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("budgets_step_failed", error=str(getattr(error, "reason", error)))
                if self._clock() > self._leads_until_s:
                    self._show(NOTHING)
            await asyncio.sleep(pause_s)

    async def step(self) -> float:
        """Read the usage of due budgets with at most one query per period.

        The leader calls this method every second, even if nothing is due, because another control
        plane would otherwise acquire the expired lease.

        Returns:
            Seconds until the next step.

        Raises:
            DatabaseDownError: PostgreSQL does not answer.
        """
        # most installations have no budgets, and then no lease is needed
        if not await self._database.run_singly(repository.has_any):
            self._show(NOTHING)
            return _TICK_S
        due, now_ms = await self._database.run(self._look)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._read_usage(period, members, now_ms))
                for period, members in due.items()
                if members
            ]
        found = [reading for answer in asked for reading in answer.result()]
        if found:
            await self._write(found)
        rests_s = (it.rests_until_s - self._clock() for it in self._paces.values() if it.is_behind)
        return max(0.0, min((_TICK_S, *rests_s)))

    async def _look(self, connection: AsyncConnection) -> tuple[dict[Period, list[Due]], int]:
        """Return the due budgets and the time in Unix milliseconds.

        No budgets are returned if another process has the lease.
        """
        due: dict[Period, list[Due]] = {}
        now_ms, now_s = await clock_ms(connection), self._clock()
        if not await repository.hold_lease(connection, _LEASE, self._process, _LEASE_S):
            self._show(NOTHING)
            for pace in self._paces.values():
                pace.took(())
            return due, now_ms
        self._leads_until_s = now_s + _LEASE_S
        self._show(await repository.summary(connection))
        for period, pace in self._paces.items():
            if now_s >= pace.rests_until_s:
                asked = (period, self._interval_s, pace.asked_max, pace.tried)
                due[period] = await repository.due(connection, *asked)
                pace.took(due[period])
        return due, now_ms

    async def _read_usage(self, period: Period, due: Sequence[Due], now_ms: int) -> list[Reading]:
        """Query the ledger for all tenants of the given budgets. A failure is logged."""
        pace, span, asked_s = self._paces[period], span_at(period, now_ms), self._clock()
        tenant_ids = {one.tenant_id for one in due}
        model_ids = {one.model_id for one in due if one.model_id}
        try:
            ledger = await self._ledger.usage(span, tenant_ids, model_ids)
        except FeedDownError as error:
            if not pace.failures:
                log.warning("budgets_not_read", period=str(period), error=str(error))
            pace.failed(self._clock(), self._clock() - asked_s)
            pace.tried |= {one.id: now_ms for one in due}
            return []
        if pace.failures:
            log.info("budget_reading_resumed", period=str(period))
        pace.answered(self._clock(), self._clock() - asked_s)
        for one in due:
            pace.tried.pop(one.id, None)
        return readings(due, span, ledger, now_ms)

    async def _write(self, found: Sequence[Reading]) -> None:
        async def write(connection: AsyncConnection) -> list[repository.BudgetChange]:
            return await repository.write_readings(connection, found)

        for change in await self._database.run(write):
            log.info(
                "budget_state_changed",
                tenant=change.tenant_id,
                budget=change.name,
                state=str(change.state),
                reached_percent=change.reached_percent,
                used=change.used,
                amount=change.amount,
            )


def readings(due: Sequence[Due], span: BudgetSpan, ledger: Ledger, now_ms: int) -> list[Reading]:
    """Return each budget's usage from the ledger. Without a model, all models are added up."""
    of_tenant = ledger.by_tenant()
    nothing = Usage()
    return [
        Reading(
            one,
            span,
            ledger.usage.get((one.tenant_id, one.model_id), nothing)
            if one.model_id
            else of_tenant.get(one.tenant_id, nothing),
            now_ms,
            ledger.ingested_until_ms,
        )
        for one in due
    ]
