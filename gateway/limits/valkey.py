"""A Valkey connection for many small calls: those of one event-loop tick leave in one write.

One raw connection per process, replies in order of the calls. What it never does is wait for long:
a call has a deadline, and without a connection it fails at once.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import cast
from urllib.parse import unquote, urlsplit

import hiredis
import structlog

from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

_CALLS_MAX = 20_000  # waiting for replies; more would not be answered within the deadline
_CONNECT_TIMEOUT_S = 1.0
_DEAD_AFTER_S = 1.0  # a reply that is this late means: the connection is no good
_BACKOFF_MAX_S = 1.0


class ValkeyError(Exception):
    """The call was not answered, or answered with an error; the message says which."""


class _Connection(asyncio.Protocol):
    """Calls and replies on one socket."""

    def __init__(self, deadline_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_s
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._outgoing: list[bytes] = []
        self._waiting: deque[asyncio.Future[object]] = deque()
        self._sent: deque[tuple[float, int]] = deque()  # (when, number of the last call in it)
        self._called = self._answered = self._expired = 0
        self.closed = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: the transports of uvloop do not derive from those of asyncio.
        self._transport = cast("asyncio.WriteTransport", transport)

    def call(self, arguments: Sequence[str | bytes | int]) -> asyncio.Future[object]:
        future: asyncio.Future[object] = self._loop.create_future()
        if self.closed.done() or len(self._waiting) >= _CALLS_MAX:
            future.set_exception(ValkeyError("closed" if self.closed.done() else "too many calls"))
            return future
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        # The stub of hiredis says: a tuple of exactly one.
        self._outgoing.append(hiredis.pack_command(tuple(arguments)))  # pyright: ignore[reportArgumentType]
        self._waiting.append(future)
        self._called += 1
        return future

    def _flush(self) -> None:
        if not self.closed.done():
            self._transport.write(b"".join(self._outgoing))
            if not self._sent:
                self._loop.call_later(self._deadline_s, self._expire)
            self._sent.append((self._loop.time(), self._called))
        self._outgoing.clear()

    def _expire(self) -> None:
        """Fail the calls whose time is up; their replies may still come and are passed over."""
        now_s = self._loop.time()
        while self._sent and self._sent[0][1] <= self._answered:
            self._sent.popleft()
        if not self._sent or self.closed.done():
            return
        if now_s - self._sent[0][0] > _DEAD_AFTER_S:
            self.close("no reply")
            return
        last = 0
        for sent_at, number in self._sent:
            if now_s - sent_at < self._deadline_s:
                break
            last = number
        for index in range(max(0, self._expired - self._answered), last - self._answered):
            if not self._waiting[index].done():
                self._waiting[index].set_exception(ValkeyError("no reply in time"))
        self._expired = max(self._expired, last)
        self._loop.call_later(self._deadline_s / 2, self._expire)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _NOTHING:
            self._answered += 1
            future = self._waiting.popleft()
            if future.done():
                continue
            if isinstance(reply, hiredis.ReplyError):
                future.set_exception(ValkeyError(str(reply)))
            else:
                future.set_result(reply)

    def close(self, reason: str) -> None:
        self._transport.close()
        self._end(reason)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(repr(exc) if exc else "closed by the server")

    def _end(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        for future in self._waiting:
            if not future.done():
                future.set_exception(ValkeyError(reason))
        self._waiting.clear()


_NOTHING = object()


class ValkeyClient:
    """Keeps one connection up; `run` belongs into the service's TaskGroup."""

    def __init__(self, url: str, *, deadline_s: float = 0.05) -> None:
        """Prepare; nothing is opened yet.

        Args:
            url: `redis://[:password@]host:port`.
            deadline_s: A call that is not answered by then fails, up to half of it later.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "valkey") or not parts.hostname:
            raise ValueError(f"not a Valkey URL: {parts.scheme}://...; want redis://host:port")
        self._host, self._port = parts.hostname, parts.port or 6379
        self._user = unquote(parts.username or "")
        self._password = unquote(parts.password or "")
        self._deadline_s = deadline_s
        self._connection: _Connection | None = None

    @property
    def is_connected(self) -> bool:
        """Whether calls go out."""
        return self._connection is not None

    def call(self, *arguments: str | bytes | int) -> asyncio.Future[object]:
        """Send one command with the others of this tick; ValkeyError when it is not answered."""
        if self._connection is None:
            raise ValkeyError("not connected")
        return self._connection.call(arguments)

    async def run(self) -> None:
        """Connect, and again whenever the connection ends, until cancelled."""
        attempt = 0
        while True:
            connection: _Connection | None = None
            try:
                connection = await self._connect()
                log.info("valkey_connected", host=self._host, port=self._port)
                attempt = 0
                self._connection = connection
                reason = await connection.closed
            except (OSError, TimeoutError, ValkeyError) as error:
                reason = repr(error)
            finally:
                self._connection = None
                if connection is not None:
                    connection.close("stopped")
            log.warning("valkey_lost", host=self._host, port=self._port, reason=reason)
            await asyncio.sleep(backoff_s(attempt, first_s=0.05, max_s=_BACKOFF_MAX_S))
            attempt += 1

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(
                lambda: _Connection(self._deadline_s), self._host, self._port
            )
        try:
            if self._password:
                names = (self._user,) if self._user else ()
                await connection.call(("AUTH", *names, self._password))
            await connection.call(("PING",))
        except BaseException:
            connection.close("greeting failed")
            raise
        return connection
