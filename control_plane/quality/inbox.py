"""A bounded queue of answers for the database. Answers that can never be stored are dropped."""

from collections import deque
from collections.abc import Callable, Sequence

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import ERRORS, Database, DatabaseDownError, is_transient
from control_plane.quality import repository
from control_plane.quality.repository import AnswerReport

log = structlog.get_logger(__name__)

# Largest number of answers that wait for the database. The oldest are dropped first.
_REPORTS_MAX = 8192
_BATCH = 512
# First characters of SQLSTATEs whose cause is not the written data, so that the write is retried
# unchanged.
_BUSY_SQLSTATES = ("08", "25", "40", "53", "55", "57", "58")


class Inbox:
    """The queue of answers that are not stored yet.

    Attributes:
        waiting: Waiting answers, the oldest first.
    """

    def __init__(self, database: Database, dropped: Callable[[str], None]) -> None:
        """Create the queue. `dropped` counts dropped answers by reason."""
        self.waiting: deque[AnswerReport] = deque(maxlen=_REPORTS_MAX)
        self._database = database
        self._dropped = dropped

    def put(self, report: AnswerReport) -> None:
        """Append an answer to the queue."""
        self.waiting.append(report)

    async def write(self) -> None:
        """Store all answers. Answers that cannot be stored now stay at the front of the queue.

        Raises:
            DatabaseDownError: The database did not answer in time.
            DBAPIError: The database refuses all writes at present.
        """
        while self.waiting:
            batch = [self.waiting.popleft() for _ in range(min(_BATCH, len(self.waiting)))]
            parts: list[Sequence[AnswerReport]] = [batch]  # batches to write, the next batch last
            try:
                while parts:
                    smaller = await self._write(parts[-1])
                    parts.pop()
                    parts += reversed(smaller)
            except (DatabaseDownError, *ERRORS):
                left = [report for part in reversed(parts) for report in part]
                room = _REPORTS_MAX - len(self.waiting)
                self.waiting.extendleft(reversed(left[max(0, len(left) - room) :]))
                raise

    async def _write(self, part: Sequence[AnswerReport]) -> list[Sequence[AnswerReport]]:
        """Store some answers in one transaction, and return the parts to retry.

        If the batch fails, the parts are its halves. A single answer that fails is dropped.
        """

        async def work(connection: AsyncConnection) -> None:
            await repository.add_reports(connection, part)

        try:
            await self._database.run(work)
        except DBAPIError as error:
            if is_transient(error) or _state_of(error).startswith(_BUSY_SQLSTATES):
                raise
            if len(part) > 1:
                return [part[: len(part) // 2], part[len(part) // 2 :]]
            self._dropped("refused")
            (bad,) = part
            about = {"node": bad.node_id, "replica": bad.replica_id, "asking": bad.asking.id}
            log.warning("answer_dropped", **about, error=repr(error.orig))
        return []


def _state_of(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")
