"""The loop that follows budgets: asks the ledger what is used, writes down what follows.

Every control plane runs it; one holds the lease, and another takes it when that was silent for
half a minute. Nothing is kept in memory, and what is written depends on the ledger alone, so a step
that is done twice, or by two at once, does no harm.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.budgets import repository
from control_plane.budgets.feed import ASKED_MAX, Ledger, UsageFeed
from control_plane.budgets.model import Period, Span, Usage, span_at
from control_plane.budgets.repository import Due, Reading
from control_plane.database import Database, DatabaseDownError
from control_plane.rollouts.feed import FeedDownError
from control_plane.rollouts.repository import clock_ms
from sluice.ids import new_id
from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_LEASE_S = 30.0  # longer than a question to the ledger may take
_REST = 4.0  # times as long as the ledger took to answer: at most a fifth of its time is ours
_RETRY_MAX_S = 15.0


class Budgets:
    """Owns the loop."""

    def __init__(
        self,
        database: Database,
        ledger: UsageFeed,
        show: Callable[[Mapping[str, int], float], None],
        count: Callable[[str], None],
        interval_s: float,
    ) -> None:
        """Prepare; `run` belongs into a TaskGroup.

        Args:
            database: Where budgets are.
            ledger: Knows what was used; while it is away, states stay as they are.
            show: Takes how many budgets have which state, and how long ago (seconds) the one was
                looked at that waits longest, for metrics; nothing and 0 while another one leads.
            count: Takes the new state of each budget that changes it by what was used.
            interval_s: How often each budget is looked at.
        """
        self._database = database
        self._ledger = ledger
        self._show = show
        self._count = count
        self._interval_s = interval_s
        self._process = new_id("budgets")
        self._failures = 0

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            pause_s = _TICK_S
            try:
                pause_s = await self.step()
            except FeedDownError as error:
                if not self._failures:
                    log.warning("budgets_not_read", error=str(error))
                pause_s = backoff_s(self._failures, first_s=_TICK_S, max_s=_RETRY_MAX_S)
                self._failures += 1
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("budgets_step_failed", error=str(getattr(error, "reason", error)))
            await asyncio.sleep(pause_s)

    async def step(self) -> float:
        """Look at the budgets that are due, at most a call's worth; return when to come back (s).

        Raises:
            FeedDownError: The ledger does not answer.
            DatabaseDownError: PostgreSQL does not.
        """
        due, now_ms = await self._database.run(self._look)
        if not due:
            return _TICK_S
        started_at = time.monotonic()
        readings = await self._read(due, now_ms)
        took_s = time.monotonic() - started_at
        if self._failures:
            log.info("budgets_read_again")
            self._failures = 0

        async def write(connection: AsyncConnection) -> list[repository.Change]:
            return await repository.write_readings(connection, readings)

        for change in await self._database.run(write):
            self._count(str(change.state))
            log.info(
                "budget_state",
                tenant=change.tenant_id,
                budget=change.name,
                state=str(change.state),
                used=change.used,
                amount=change.amount,
            )
        return max(0.0 if len(due) == ASKED_MAX else _TICK_S, took_s * _REST)

    async def _look(self, connection: AsyncConnection) -> tuple[list[Due], int]:
        """Return what is due, if we are the one who does it, and what time it is."""
        now_ms = await clock_ms(connection)
        if not await repository.hold_lease(connection, self._process, _LEASE_S):
            self._show({}, 0.0)
            return [], now_ms
        self._show(*await repository.summary(connection))
        return await repository.due(connection, self._interval_s, ASKED_MAX), now_ms

    async def _read(self, due: Sequence[Due], now_ms: int) -> list[Reading]:
        """Ask the ledger once per period, about all tenants that have budgets for it."""
        of_period: defaultdict[Period, list[Due]] = defaultdict(list)
        for one in due:
            of_period[one.period].append(one)
        spans = {period: span_at(period, now_ms) for period in of_period}
        ledgers = await asyncio.gather(
            *(
                self._ledger.usage(
                    spans[period],
                    {one.tenant_id for one in members},
                    {one.model_id for one in members if one.model_id},
                )
                for period, members in of_period.items()
            ),
            return_exceptions=True,  # so that none is left behind when another one fails
        )
        for failure in ledgers:
            if isinstance(failure, BaseException):
                raise failure
        return [
            reading
            for (period, members), ledger in zip(of_period.items(), ledgers, strict=True)
            if isinstance(ledger, Ledger)
            for reading in readings(members, spans[period], ledger, now_ms)
        ]


def readings(due: Sequence[Due], span: Span, ledger: Ledger, now_ms: int) -> list[Reading]:
    """Return what the ledger says of each budget: of its model, or of all that its tenant used."""
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
