"""The loop of alerts, which ends and silences alerts, opens incidents, and sends notices.

Every control plane runs the loop, but only the leader, which has the lease, does the work. A due
notice is stored as a row before it is sent. If a process ends in between, another process sends the
notice. So a receiver may receive a notice twice, and misses a notice only if all `ATTEMPTS_MAX`
attempts fail.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import structlog
from sqlalchemy import and_, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.alerts import repository
from control_plane.alerts.model import GroupStatus, retry_after_ms, telling
from control_plane.alerts.notices import Notice, NoticeAlert
from control_plane.alerts.receivers import Receiver
from control_plane.alerts.repository import AlertGroup
from control_plane.alerts.sending import SendError, send
from control_plane.alerts.tables import notifications
from control_plane.budgets.repository import hold_lease
from control_plane.database import Database, DatabaseDownError
from control_plane.rollouts.repository import clock_ms
from control_plane.work_poll import MayHaveWork, unknown
from sluice.ids import new_id

log = structlog.get_logger(__name__)

_TICK_S = 2.0
_LEASE, _LEASE_S = "alerts", 30.0  # lease in seconds, longer than a round of sending
_AT_ONCE = 8


class AlertService:
    """Owns the loop of alerts."""

    def __init__(
        self,
        database: Database,
        receivers: Sequence[Receiver],
        count: Callable[[str, str], None] = lambda _receiver, _result: None,
        source: str = "sluice",
        may_have_work: MayHaveWork = unknown,
    ) -> None:
        """Create the loop. `run` must be started in a TaskGroup.

        Args:
            database: Database of alerts.
            receivers: Receivers of notices.
            count: Called for each attempt with the receiver and the result, which is `sent`,
                `failed` or `given_up`.
            source: Name that PagerDuty shows as the origin.
            may_have_work: Tells whether `step` may have work.
        """
        self._database = database
        self._may_have_work = may_have_work
        self._receivers = {receiver.name: receiver for receiver in receivers}
        self._count = count
        self._source = source
        self._process = new_id("alerts")
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        """Run the loop until cancelled."""
        while True:
            try:
                if self._may_have_work():
                    await self.step()
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("alerts_step_failed", error=str(getattr(error, "reason", error)))
            await asyncio.sleep(_TICK_S)

    async def step(self) -> None:
        """End and silence alerts, open incidents, and send due notices.

        Raises:
            DatabaseDownError: PostgreSQL does not answer.
        """
        # In most rounds there is no work, and then no lease is needed.
        if not await self._database.run_singly(repository.has_work):
            return
        due = await self._database.run(self._look)
        async with asyncio.TaskGroup() as tasks:
            for row in due:
                tasks.create_task(self._send(row))

    async def _look(self, connection: AsyncConnection) -> list[Mapping[str, Any]]:
        """Return the due notices, or none if another process has the lease."""
        if not await hold_lease(connection, _LEASE, self._process, _LEASE_S):
            return []
        await repository.step(connection)
        now_ms = await clock_ms(connection)
        for group in await repository.groups(connection):
            for receiver in self._receivers.values():
                if group.rank <= receiver.rank_max:
                    await _plan(connection, group, receiver.name, now_ms)
        t = notifications.c
        is_due = and_(
            t.state == "pending", t.next_at_unix_ms <= now_ms, t.receiver.in_(self._receivers)
        )
        query = select(notifications).where(is_due).order_by(t.next_at_unix_ms).limit(_AT_ONCE)
        return [dict(row) for row in (await connection.execute(query)).mappings().all()]

    async def _send(self, row: Mapping[str, Any]) -> None:
        """Send a notice, and store the outcome."""
        receiver, notice = self._receivers[row["receiver"]], _notice(row["notice"])
        change: dict[str, Any] = {"state": "sent", "error": ""}
        try:
            async with self._places:
                await send(receiver, notice, self._source)
        except SendError as error:
            change = await self._failed(row, error)
        self._count(receiver.name, _RESULTS[change["state"]])
        t = notifications.c
        is_it = and_(
            t.id == row["id"],
            t.told_at == row["told_at"],  # unless a newer notice has replaced the row
        )
        change["attempts"] = row["attempts"] + 1

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(update(notifications).where(is_it).values(change))

        await self._database.run(write)

    async def _failed(self, row: Mapping[str, Any], error: SendError) -> dict[str, Any]:
        wait_ms = retry_after_ms(row["attempts"] + 1, error.after_ms) if error.may_repeat else None
        log.warning(
            "alert_not_delivered",
            receiver=row["receiver"],
            group=row["group_key"],
            reason=error.reason,
            attempts=row["attempts"] + 1,
            is_given_up=wait_ms is None,
        )
        if wait_ms is None:
            return {"state": "failed", "error": error.reason}
        now_ms = await self._database.run(clock_ms)
        return {"state": "pending", "error": error.reason, "next_at_unix_ms": now_ms + wait_ms}


_RESULTS = {"sent": "sent", "pending": "failed", "failed": "given_up"}


async def _plan(connection: AsyncConnection, group: AlertGroup, receiver: str, now_ms: int) -> None:
    """Store a notice about a group for a receiver, if a notice is due now."""
    told = group.told.get(receiver)
    status = telling(group.members, told, now_ms)
    if status is None:
        return
    rows: Sequence[Mapping[str, Any]] = group.firing
    if status is GroupStatus.RESOLVED:
        rows = await repository.ended_of(connection, told.fingerprints if told else ())
    notice = repository.notice_of(group.key, status, rows)
    fires = [row["fingerprint"] for row in group.firing] if status is GroupStatus.FIRING else []
    values = {
        "status": str(status),
        "fingerprints": fires,
        "notice": asdict(notice),
        "state": "pending",
        "attempts": 0,
        "next_at_unix_ms": now_ms,
        "error": "",
    }
    key = {"id": f"{receiver}/{group.key}", "receiver": receiver, "group_key": group.key}
    made = insert(notifications).values(**key, **values)
    await connection.execute(
        made.on_conflict_do_update(
            index_elements=["id"],
            set_=values | {"told_at": func.clock_timestamp()},
        )
    )


def _notice(stored: Mapping[str, Any]) -> Notice:
    """Return the notice from its stored form."""
    return Notice(
        group=stored["group"],
        status=GroupStatus(stored["status"]),
        alerts=[NoticeAlert(**alert) for alert in stored["alerts"]],
    )
