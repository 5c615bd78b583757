"""Transactions on PostgreSQL that survive its restarts.

A piece of work runs in one transaction. When the server goes away or a lock is lost, the work runs
again from its beginning until a deadline. So it must have no effect outside its transaction, and be
harmless to repeat when the answer to its commit was lost.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg
import structlog
from sqlalchemy import URL, make_url, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from sluice.errors import ErrorCode, PlatformError
from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

_POOL_SIZE = 8
_CONNECT_TIMEOUT_S = 2.0
_SERVER_SETTINGS = {
    "application_name": "sluice-control-plane",
    "statement_timeout": "5s",
    "lock_timeout": "4s",
    "idle_in_transaction_session_timeout": "10s",
}
# Of our sessions, those whose process has been silent within a statement for longer than any takes.
_END_FROZEN = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND usename = current_user"
    " AND application_name = current_setting('application_name') AND pid <> pg_backend_pid()"
    " AND xact_start IS NOT NULL AND wait_event_type = 'Client'"
    " AND state_change < clock_timestamp() - interval '10 s'"
)
# Worth another try: gone away, starting up, shutting down; lost a deadlock or a serialization race;
# and what an operator has to mend: no such database, no access, no tables yet.
_TRANSIENT_SQLSTATES = ("08", "57P", "40001", "40P01", "53300", "3D000", "28", "42P01")

ERRORS: tuple[type[Exception], ...] = (
    DBAPIError,
    PoolTimeoutError,
    asyncpg.InterfaceError,
    OSError,
    TimeoutError,
)


class DatabaseDownError(PlatformError):
    """PostgreSQL did not answer in time."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            ErrorCode.UNAVAILABLE,
            "the database cannot be reached, and probably nothing was changed; try again",
            retry_after_s=2.0,
        )
        self.reason = reason


def is_transient(error: BaseException) -> bool:
    """Return whether the same work may succeed a little later."""
    if isinstance(error, IntegrityError):
        return False
    if not isinstance(error, DBAPIError):
        return isinstance(error, ERRORS)
    state = getattr(error.orig, "sqlstate", None)
    return error.connection_invalidated or state is None or state.startswith(_TRANSIENT_SQLSTATES)


async def end_frozen(connection: AsyncConnection) -> None:
    """End the transactions of frozen control planes, with all their locks.

    PostgreSQL's own timeouts run only between statements, not while it waits for the next message
    of one. The effect is immediate, whatever becomes of this transaction; so call this first in a
    step that may wait for such locks.
    """
    await connection.execute(_END_FROZEN)


class Database:
    """A bounded pool of connections; all access goes through `run`."""

    def __init__(self, url: str) -> None:
        """Prepare; no connection is opened yet."""
        self.url: URL = make_url(url)
        self._engine = create_async_engine(
            self.url,
            pool_size=_POOL_SIZE,
            max_overflow=0,
            pool_timeout=_CONNECT_TIMEOUT_S,
            # On a connection that is gone BEGIN fails, the others are dropped with it, and `run`
            # tries again: a question before each transaction would take half of its time.
            pool_pre_ping=False,
            connect_args={"timeout": _CONNECT_TIMEOUT_S, "server_settings": _SERVER_SETTINGS},
        )

    async def run(
        self,
        work: Callable[[AsyncConnection], Awaitable[Result]],
        *,
        deadline_s: float = 4.0,
        isolation: str = "READ COMMITTED",
    ) -> Result:
        """Run `work` in a transaction and commit it.

        Raises:
            DatabaseDownError: The work did not succeed within the deadline.
            IntegrityError: Another error that a retry does not help.
        """
        attempt = 0
        reason = ""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        return await self._run_once(work, isolation)
                    except ERRORS as error:
                        if not is_transient(error):
                            raise
                        reason = repr(error.__cause__ or error)
                    pause_s = backoff_s(attempt, first_s=0.05, max_s=0.5)
                    attempt += 1
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads
        except TimeoutError:
            raise DatabaseDownError(reason or f"no answer within {deadline_s:g} s") from None

    async def run_singly(
        self,
        work: Callable[[AsyncConnection], Awaitable[Result]],
        *,
        deadline_s: float = 4.0,
    ) -> Result:
        """Run `work`, each statement of which is a transaction of its own.

        For what is asked every second and finds nothing: BEGIN and COMMIT cost as much as a short
        statement. Reads see the same as in `run`: what is committed when a statement begins. Locks
        end with their statement.

        Raises:
            DatabaseDownError: The work did not succeed within the deadline.
        """
        return await self.run(work, deadline_s=deadline_s, isolation="AUTOCOMMIT")

    async def _run_once(
        self, work: Callable[[AsyncConnection], Awaitable[Result]], isolation: str
    ) -> Result:
        async with self._engine.connect() as connection:
            await connection.execution_options(isolation_level=isolation)
            async with connection.begin():
                return await work(connection)

    def dedicated(self) -> AsyncConnection:
        """Return a connection to open with `async with` and hold, for LISTEN."""
        return self._engine.connect()

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()
