"""Transactions on PostgreSQL that survive its restarts.

Each unit of work runs in one transaction. When the server is lost or a deadlock is detected, the
work is retried from its beginning until a deadline. So the work must have no effect outside its
transaction, and a repetition must do no harm if the answer to the commit was lost.
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
# Ends the database sessions of frozen control planes. A process is frozen if PostgreSQL has waited
# for it within a transaction for longer than any statement may run.
_END_FROZEN = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND usename = current_user"
    " AND application_name = current_setting('application_name') AND pid <> pg_backend_pid()"
    " AND xact_start IS NOT NULL AND wait_event_type = 'Client'"
    " AND state_change < clock_timestamp() - interval '10 s'"
)
# Errors after which the work is retried. The server is stopped, starting up or shutting down, or it
# has detected a deadlock or a serialization failure. A missing database, missing access and missing
# tables also belong to these errors, because an operator may repair them.
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
    """Return whether a retry of the work a little later may succeed."""
    if isinstance(error, IntegrityError):
        return False
    if not isinstance(error, DBAPIError):
        return isinstance(error, ERRORS)
    state = getattr(error.orig, "sqlstate", None)
    return error.connection_invalidated or state is None or state.startswith(_TRANSIENT_SQLSTATES)


async def end_frozen(connection: AsyncConnection) -> None:
    """End the transactions of frozen control planes, which releases all their locks.

    PostgreSQL's own timeouts run only between statements, but a frozen process may be silent within
    a statement. The sessions end immediately, even if this transaction fails. Steps that may wait
    for locks of frozen processes call this function first.
    """
    await connection.execute(_END_FROZEN)


class Database:
    """A bounded pool of connections. Transactions on PostgreSQL run only through `run`."""

    def __init__(self, url: str) -> None:
        """Configure the pool. No connection is opened yet."""
        self.url: URL = make_url(url)
        self._engine = create_async_engine(
            self.url,
            pool_size=_POOL_SIZE,
            max_overflow=0,
            pool_timeout=_CONNECT_TIMEOUT_S,
            # On a lost connection BEGIN fails, the pool drops its other connections, and `run`
            # retries. A ping before each transaction would cost half of the transaction's time.
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
            IntegrityError: The rows violate a constraint, so that a retry cannot succeed.
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
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
        except TimeoutError:
            raise DatabaseDownError(reason or f"no answer within {deadline_s:g} s") from None

    async def run_singly(
        self,
        work: Callable[[AsyncConnection], Awaitable[Result]],
        *,
        deadline_s: float = 4.0,
    ) -> Result:
        """Run `work` with each statement in a separate transaction.

        The method is for queries that run every second and mostly return no rows, because BEGIN and
        COMMIT cost as much as a short statement. Each statement reads the rows that are committed
        when it begins, as in `run`. A lock ends with the statement that acquired it.

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
        """Return a long-lived connection for LISTEN, to be opened with `async with`."""
        return self._engine.connect()

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()
