"""One connection to Valkey, kept up: bytes out, parsed replies in, in order.

It never waits for long and retries apart from others: gateways that lost the same server do not
return at the same moment.
"""

import asyncio
import random
import ssl
from collections import deque
from typing import Protocol, cast
from urllib.parse import SplitResult, unquote, urlsplit

import hiredis
import structlog

from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

_CONNECT_TIMEOUT_S = 1.0
_BACKOFF_MAX_S = 1.0
_PORT = 6379
_NO_URL = (
    "not a Valkey URL; want redis://[[user]:password@]host:port, with what is special in a password"
    " as its code, such as %2F for a slash"
)
_PLAIN, _TLS = ("redis", "valkey"), ("rediss", "valkeys")
_NOTHING = object()


class ValkeyError(Exception):
    """The greeting was refused; the message says why."""


class Listener(Protocol):
    """Who uses the connection."""

    def connected(self) -> None:
        """Calls may go out; nothing of an earlier connection will be answered."""
        ...

    def replied(self, reply: object) -> None:
        """The next reply came."""
        ...

    def refused(self, message: str) -> None:
        """The next reply came; it is an error."""
        ...

    def disconnected(self) -> None:
        """What was sent and not answered never will be."""
        ...


class _Connection(asyncio.Protocol):
    """Replies go to the greeting first, then to the listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._greetings: deque[asyncio.Future[object]] = deque()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: the transports of uvloop do not derive from those of asyncio.
        self.transport = cast("asyncio.WriteTransport", transport)

    def ask(self, *arguments: str) -> asyncio.Future[object]:
        """Send a command of the greeting."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._greetings.append(future)
        self.transport.write(hiredis.pack_command(arguments))  # pyright: ignore[reportArgumentType]
        return future

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING and not self.closed.done():
                self._deliver(reply)
        except hiredis.ProtocolError as error:
            self.close(repr(error))

    def _deliver(self, reply: object) -> None:
        message = str(reply) if isinstance(reply, hiredis.ReplyError) else None
        future = self._greetings.popleft() if self._greetings else None
        if future is None:
            if message is None:
                self._listener.replied(reply)
            else:
                self._listener.refused(message)
        elif not future.done():
            if message is None:
                future.set_result(reply)
            else:
                future.set_exception(ValkeyError(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(repr(exc) if exc else "closed by the server")

    def close(self, reason: str) -> None:
        self.transport.abort()
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        while self._greetings:
            future = self._greetings.popleft()
            if not future.done():
                future.set_exception(ValkeyError(reason))


def _split(url: str) -> tuple[SplitResult, int]:
    """Return the parts of a URL, and its port; ValueError."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORT
    except ValueError:  # which may quote the password
        raise ValueError(_NO_URL) from None
    if parts.scheme not in (*_PLAIN, *_TLS) or not parts.hostname:
        raise ValueError(_NO_URL)
    if parts.path not in {"", "/", "/0"} or parts.query or parts.fragment:
        raise ValueError(_NO_URL)  # most likely a password that is cut in two
    return parts, port


class ValkeyClient:
    """Keeps one connection up; `run` belongs into the service's TaskGroup."""

    def __init__(self, url: str, *, deadline_s: float = 0.05) -> None:
        """Prepare; nothing is opened yet.

        Args:
            url: `redis://[[user]:password@]host:port`, or `rediss://` for TLS, with a server whose
                certificate the system's CAs (or SSL_CERT_FILE) vouch for.
            deadline_s: What a call may take; the listener keeps to it.

        Raises:
            ValueError: It is no such URL; the text quotes nothing of it.
        """
        parts, port = _split(url)
        self._tls = ssl.create_default_context() if parts.scheme in _TLS else None
        self.deadline_s = deadline_s
        self._host, self._port = parts.hostname or "", port
        self._user = unquote(parts.username or "")
        self._password = unquote(parts.password or "")
        self._connection: _Connection | None = None
        self._listener: Listener | None = None

    @property
    def is_connected(self) -> bool:
        """Whether a server has answered the greeting, and was not lost since."""
        return self._connection is not None

    def listen(self, listener: Listener) -> None:
        """Name the one who uses the connection, before `run`."""
        self._listener = listener

    def send(self, data: bytes) -> None:
        """Send whole commands; lost without a connection."""
        if self._connection is not None:
            self._connection.transport.write(data)

    def drop(self, reason: str) -> None:
        """Give the connection up and make a new one."""
        if self._connection is not None:
            log.info("valkey_dropped", host=self._host, port=self._port, reason=reason)
            self._connection.close("")

    async def run(self) -> None:
        """Connect, and again whenever the connection ends, until cancelled."""
        listener = self._listener
        assert listener is not None, "nobody listens"
        attempt = 0
        while True:
            connection: _Connection | None = None
            try:
                connection = await self._connect(listener)
                log.info("valkey_connected", host=self._host, port=self._port)
                attempt = 0
                self._connection = connection
                listener.connected()
                reason = await connection.closed
            except (OSError, TimeoutError, ValkeyError) as error:
                reason = repr(error)
            finally:
                if connection is not None:
                    connection.close("stopped")
                if self._connection is not None:
                    self._connection = None
                    listener.disconnected()
            if reason:  # else it was dropped
                log.warning("valkey_lost", host=self._host, port=self._port, reason=reason)
            pause_s = backoff_s(attempt, first_s=0.05, max_s=_BACKOFF_MAX_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads
            attempt += 1

    async def _connect(self, listener: Listener) -> _Connection:
        loop = asyncio.get_running_loop()
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(listener), self._host, self._port, ssl=self._tls
                )
                if self._password:
                    names = (self._user,) if self._user else ()
                    await connection.ask("AUTH", *names, self._password)
                await connection.ask("PING")
        except BaseException:
            if connection is not None:
                connection.close("greeting failed")
            raise
        return connection
