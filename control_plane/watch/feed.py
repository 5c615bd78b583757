"""The control plane's copy of the state in memory, which is updated from PostgreSQL.

All watchers are served from this copy.

NOTIFY only signals a change. The changed ids are read from the table `changes`, and then the
changed objects are read. So a lost or duplicate notification does no harm. While PostgreSQL is
down, the copy stays available and watchers stay connected.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import ERRORS, Database, DatabaseDownError
from control_plane.tables import changes
from control_plane.watch import rows
from control_plane.watch.history import Delta, History
from sluice.lifecycle import backoff_s
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

log = structlog.get_logger(__name__)

_CHANNEL = "sluice_changes"
# seconds between polls, which are also the longest delay of a change whose notification was lost
_POLL_S = 2.0
# largest number of changed objects in a delta, above which a new snapshot is read
_DELTA_OBJECTS_MAX = 20_000
# a new snapshot is built if the deltas since the last snapshot exceed a quarter of its size
_SNAPSHOT_STALE_SHARE = 4
_LOAD_TIMEOUT_S = 30.0
_CATCH_UP_TIMEOUT_S = 4.0
_LISTEN_TIMEOUT_S = 3.0
_NEWEST = select(func.max(changes.c.version))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state at `version` as serialized `WatchResponse` parts.

    The last part is marked as the last.
    """

    version: int
    parts: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of all parts, in bytes."""
        return sum(len(part) for part in self.parts)


class Feed:
    """Holds the current state and recent history, and an event that signals changes."""

    def __init__(self, database: Database) -> None:
        self.state = ControlState()
        self.history = History()
        self.is_loaded = False
        self.is_database_up = False
        self.refresh_s = 0.0  # duration of the last read of changes, in seconds
        self._database = database
        self._changed = asyncio.Event()
        self._notified = asyncio.Event()
        self._snapshot = Snapshot(-1, ())
        self._snapshot_lock = asyncio.Lock()
        self._callbacks: list[Callable[[wire.WatchResponse], None]] = []

    def on_change(self, callback: Callable[[wire.WatchResponse], None]) -> None:
        """Register a callback for each change of the state. The callback must be fast.

        If `is_snapshot` is set in the change, any object may have changed, and the change names no
        objects.
        """
        self._callbacks.append(callback)

    def changed(self) -> asyncio.Event:
        """Return the event that the next change sets. Callers read the event before the state."""
        return self._changed

    async def snapshot(self) -> Snapshot:
        """Return a snapshot, from which the history leads to the newest state. Callers share it.

        A new snapshot is built only if the history since the last snapshot has grown long. So
        during a burst of changes, new watchers need no separate snapshot for each version.
        """
        async with self._snapshot_lock:
            newer = self.history.since(self._snapshot.version)
            newer_bytes = sum(len(delta.payload) for delta in newer or ())
            if newer is None or newer_bytes * _SNAPSHOT_STALE_SHARE > self._snapshot.size_bytes:
                version, parts = self.state.version, []
                for part in self.state.serialized():
                    parts.append(part)
                    # yields to other tasks, because the serialization of a large state takes long
                    await asyncio.sleep(0)
                self._snapshot = Snapshot(version, tuple(parts))
            return self._snapshot

    async def run(self) -> None:
        """Follow the changes in PostgreSQL until cancelled."""
        attempt = 0
        while True:
            try:
                async with self._listening() as connection:
                    await self._load_or_catch_up(_LOAD_TIMEOUT_S)
                    self._set_up(is_up=True)
                    attempt = 0
                    await self._follow(connection)
            except (*ERRORS, DatabaseDownError) as error:
                reason = error.reason if isinstance(error, DatabaseDownError) else repr(error)
                self._set_up(is_up=False, reason=reason)
            await asyncio.sleep(backoff_s(attempt, first_s=0.1, max_s=1.0))
            attempt += 1

    async def _follow(self, connection: Any) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._notified.wait()
            is_due = self._notified.is_set()
            self._notified.clear()
            if connection.is_closed():
                raise ConnectionError("the listening connection was closed")
            if is_due or await self._is_behind():
                await self._load_or_catch_up(_CATCH_UP_TIMEOUT_S)

    async def _is_behind(self) -> bool:
        """Return whether the database has another version than the copy."""
        newest = await self._database.run_singly(_newest, deadline_s=_CATCH_UP_TIMEOUT_S)
        return newest != self.state.version

    @asynccontextmanager
    async def _listening(self) -> AsyncGenerator[Any]:
        """Yield the driver's connection that executes LISTEN, because SQLAlchemy has no LISTEN."""

        def on_notify(*_: object) -> None:
            self._notified.set()

        async with asyncio.timeout(_LISTEN_TIMEOUT_S):
            connection = await self._database.dedicated().start()
        try:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            async with asyncio.timeout(_LISTEN_TIMEOUT_S):
                await driver.add_listener(_CHANNEL, on_notify)
            driver.add_termination_listener(on_notify)
            yield driver
        finally:
            # the connection still listens and must not return to the pool
            await connection.invalidate()
            await connection.close()

    async def _load_or_catch_up(self, timeout_s: float) -> None:
        started_at = time.monotonic()
        news = await self._database.run(
            self._read, deadline_s=timeout_s, isolation="REPEATABLE READ"
        )
        self.refresh_s = time.monotonic() - started_at
        if isinstance(news, ControlState):
            await self._start_from(news)
        elif news is not None:
            self._publish(news)

    async def _read(self, connection: AsyncConnection) -> wire.WatchResponse | ControlState | None:
        """Return a delta, a snapshot if no delta is possible, or None if nothing changed."""
        oldest, newest = (
            await connection.execute(
                select(func.min(changes.c.version), func.max(changes.c.version))
            )
        ).one()
        known = self.state.version
        if newest == known:
            return None
        # The newest change is never pruned, so all pruned changes have versions below `oldest`.
        if known and oldest <= known < newest:
            query = (
                select(changes.c.kind, changes.c.object_id)
                .where(changes.c.version > known)
                .distinct()
                .limit(_DELTA_OBJECTS_MAX + 1)
            )
            changed = (await connection.execute(query)).tuples().all()
            if len(changed) <= _DELTA_OBJECTS_MAX:
                return await _read_delta(connection, newest, changed)
        return await _read_state(connection, newest)

    async def _start_from(self, coming: ControlState) -> None:
        """Replace the state by a snapshot. The old objects are removed in small steps."""
        before = ControlState()
        async with self._snapshot_lock:
            before.become(self.state)
            self.state.become(coming)
            self.history.restart(self.state.version)
            self._snapshot = Snapshot(-1, ())  # a restored database assigns the same versions again
        self.is_loaded = True
        log.info("state_loaded", version=self.state.version, seconds=round(self.refresh_s, 3))
        self._wake(wire.WatchResponse(version=self.state.version, is_snapshot=True))
        for _ in before.drop():
            await asyncio.sleep(0)

    def _publish(self, delta: wire.WatchResponse) -> None:
        if self.state.apply(delta):
            has_removals = delta.HasField("removals")
            self.history.append(Delta(delta.version, delta.SerializeToString(), has_removals))
            self._wake(delta)

    def _wake(self, change: wire.WatchResponse) -> None:
        for callback in self._callbacks:
            callback(change)
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def _set_up(self, *, is_up: bool, reason: str = "") -> None:
        if is_up and not self.is_database_up:
            log.info("database_connected")
        elif not is_up and (self.is_database_up or not self.is_loaded):
            log.warning("database_lost", reason=reason)
        self.is_database_up = is_up


async def _read_state(connection: AsyncConnection, version: int) -> ControlState:
    coming = ControlState()
    for kind in rows.KINDS.values():
        async with aclosing(rows.read_all(connection, kind)) as parts:
            async for part in parts:
                for _ in coming.fill(part):
                    pass
                await asyncio.sleep(0)  # so that other tasks run between two parts
    coming.version = version
    return coming


async def _newest(connection: AsyncConnection) -> int | None:
    return await connection.scalar(_NEWEST)


async def _read_delta(
    connection: AsyncConnection, version: int, changed: list[tuple[str, str]] | Any
) -> wire.WatchResponse:
    response = wire.WatchResponse(version=version)
    for name, kind in rows.KINDS.items():
        keys = sorted(key for of, key in changed if of == name)
        if keys:
            found = await rows.read(connection, kind, keys)
            getattr(response.upserts, name).extend(found)
            there = {getattr(message, kind.key.name) for message in found}
            getattr(response.removals, name).extend(key for key in keys if key not in there)
    return response
