"""One connection to Valkey's primary, which keeps the order of commands, and reconnects.

The connection of redis-py is direct, over TLS, or to the primary that Sentinels name. Reconnections
have random delays. Otherwise all gateways that lost one server would reconnect at once.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

import structlog
from redis.asyncio import ConnectionPool, Sentinel, SSLConnection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

_CONNECT_TIMEOUT_S = 1.0  # Seconds to connect, including the greeting.
# Seconds until the next Sentinel is queried, because a lost host never answers.
_SENTINEL_TIMEOUT_S = 0.3
_BACKOFF_MAX_S = 1.0
_COMMANDS_MAX = 16  # Commands that wait to be written. The limiter has one in flight at a time.
_PORT, _SENTINEL_PORT = 6379, 26379
_NO_URL = (
    "not a Valkey URL; want redis://[[user]:password@]host:port, or for Sentinels"
    " redis+sentinel://[[user]:password@]host:port[,host:port]/name-of-the-primary, with what is"
    " special in a password as its code, such as %2F for a slash"
)
_PLAIN, _TLS = ("redis", "valkey"), ("rediss", "valkeys")
_SENTINEL = "+sentinel"

# redis-py must neither retry commands nor decode replies, since the gateway handles errors itself.
_OPTIONS: dict[str, Any] = {
    "protocol": 2,
    "driver_info": None,
    "socket_timeout": None,
    "socket_connect_timeout": _CONNECT_TIMEOUT_S,
}

Word = bytes | int


class ValkeyError(Exception):
    """The connection has failed. The message has the reason."""


class ValkeyListener(Protocol):
    """The user of a connection."""

    def connected(self) -> None:
        """Handle a new connection. Commands sent before it are never answered."""
        ...

    def replied(self, reply: object) -> None:
        """Handle the next reply."""
        ...

    def refused(self, error: ResponseError) -> None:
        """Handle the next reply, which is an error."""
        ...

    def disconnected(self) -> None:
        """Handle the loss of the connection. Open commands are never answered."""
        ...


class _Place(NamedTuple):
    """The addresses and the account of a URL.

    Attributes:
        hosts: Names and ports, of one server or of Sentinels.
        primary: Name of the primary in the Sentinels' configuration, empty without Sentinels.
        options: Keyword arguments of a connection of redis-py.
    """

    hosts: list[tuple[str, int]]
    primary: str
    options: dict[str, Any]


def _parse(url: str) -> _Place:
    """Return the addresses and the account of a URL, or raise ValueError without its password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(_NO_URL) from None
    scheme = parts.scheme.removesuffix(_SENTINEL)
    is_sentinel = scheme != parts.scheme
    if scheme not in (*_PLAIN, *_TLS) or parts.query or parts.fragment:
        raise ValueError(_NO_URL)
    primary = parts.path.strip("/") if is_sentinel else ""
    if "/" in primary or bool(primary) != is_sentinel:
        raise ValueError(_NO_URL)
    if not is_sentinel and parts.path not in {"", "/", "/0"}:
        raise ValueError(_NO_URL)  # the password may contain a slash that is not percent-encoded
    account, _, places = parts.netloc.rpartition("@")
    options = dict(_OPTIONS)
    if account:
        user, _, password = account.partition(":")
        options |= {"username": unquote(user) or None, "password": unquote(password) or None}
    if scheme in _TLS:
        options |= {"ssl": True, "ssl_check_hostname": True}
    port = _SENTINEL_PORT if is_sentinel else _PORT
    hosts = [_host(parts, place, port) for place in places.split(",")]
    if len(hosts) > 1 and not is_sentinel:
        raise ValueError(_NO_URL)
    return _Place(hosts, unquote(primary), options)


def _host(parts: SplitResult, place: str, port: int) -> tuple[str, int]:
    one = parts._replace(netloc=place)
    try:
        host = one.hostname or "", one.port or port
    except ValueError:
        raise ValueError(_NO_URL) from None
    if not host[0] or "@" in place:
        raise ValueError(_NO_URL)
    return host


def _sentinel(place: _Place) -> Sentinel | None:
    # Sentinels use the same account and the same transport as the servers that they watch.
    options = place.options | {
        "socket_timeout": _SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }
    return Sentinel(place.hosts, sentinel_kwargs=options) if place.primary else None


def _pool(place: _Place, sentinel: Sentinel | None) -> ConnectionPool:
    """Return redis-py's pool, which creates the connections.

    The pool stores no connection, because only one is open at a time.
    """
    options = dict(place.options)
    if sentinel is not None:
        return SentinelConnectionPool(place.primary, sentinel, **options)
    host, port = place.hosts[0]
    if options.pop("ssl", False):
        options["connection_class"] = SSLConnection
    return ConnectionPool(host=host, port=port, **options)


class ValkeyClient:
    """Maintains one connection. Its `run` has to run in the service's TaskGroup."""

    def __init__(
        self, url: str, *, deadline_s: float = 0.05, commands_max: int = _COMMANDS_MAX
    ) -> None:
        """The URL is parsed here, and the connection is opened by `run`.

        Args:
            url: `redis://[[user]:password@]host:port` names one server. `rediss://` uses TLS, with
                a server certificate of the system's CAs (or SSL_CERT_FILE). Sentinels and the name
                of their primary are `redis+sentinel://...host:port,host:port/name`.
            deadline_s: Maximum duration of a call in seconds, which the listener enforces.
            commands_max: Largest number of commands that wait to be written.

        Raises:
            ValueError: The URL is not valid. The text quotes nothing of the URL.
        """
        place = _parse(url)
        self._sentinel = _sentinel(place)
        self._pool = _pool(place, self._sentinel)
        # A Sentinel may use up its timeout twice, once to connect and once to answer the query.
        sentinels = len(place.hosts) if place.primary else 0
        self._connect_timeout_s = _CONNECT_TIMEOUT_S + 2 * _SENTINEL_TIMEOUT_S * sentinels
        self._reason = {
            "host": ",".join(host for host, _ in place.hosts),
            "port": place.hosts[0][1],
        }
        self.deadline_s = deadline_s
        self._commands_max = commands_max
        self._listener: ValkeyListener | None = None
        self._commands: asyncio.Queue[Sequence[Word]] | None = None  # None without a connection
        self._leash: asyncio.Timeout | None = None

    @property
    def is_connected(self) -> bool:
        """Whether a server has answered the greeting and has not been lost since."""
        return self._commands is not None

    def listen(self, listener: ValkeyListener) -> None:
        """Set the listener of the connection, before `run` is called."""
        self._listener = listener

    def send(self, words: Sequence[Word]) -> None:
        """Send a command, which is dropped without a connection."""
        if self._commands is not None:
            try:
                self._commands.put_nowait(words)
            except asyncio.QueueFull:
                self.drop("commands are not taken")

    def drop(self, reason: str) -> None:
        """Close the connection and open a new one."""
        if self._leash is not None and self._leash.when() is None:
            log.info("valkey_dropped", **self._reason, reason=reason)
            self._leash.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Connect and, whenever the connection ends, reconnect until cancelled."""
        listener = self._listener
        assert listener is not None, "nobody listens"
        attempt = 0
        try:
            while True:
                try:
                    connection = await self._connect()
                except (OSError, TimeoutError, RedisError, ValkeyError) as error:
                    log.warning("valkey_lost", **self._reason, reason=_reason(error))
                else:
                    log.info("valkey_connected", **self._reason)
                    attempt = 0
                    await self._use(connection, listener)
                pause_s = backoff_s(attempt, first_s=0.05, max_s=_BACKOFF_MAX_S)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load
                attempt += 1
        finally:
            if self._sentinel is not None:
                await self._sentinel.aclose()

    async def _connect(self) -> AbstractConnection:
        """Return a connection whose server has answered a PING."""
        connection = self._pool.make_connection()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connection.connect()
                await _greet(connection)
        except BaseException:
            await _close(connection)
            raise
        return connection

    async def _use(self, connection: AbstractConnection, listener: ValkeyListener) -> None:
        """Transfer commands and replies until the connection ends or is dropped."""
        commands = self._commands = asyncio.Queue[Sequence[Word]](self._commands_max)
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(_write(connection, commands))
            try:
                await self._listen(connection, listener)
            finally:
                self._commands = None
                writer.cancel()
                await _close(connection)
                listener.disconnected()

    async def _listen(self, connection: AbstractConnection, listener: ValkeyListener) -> None:
        try:
            async with asyncio.timeout(None) as self._leash:
                listener.connected()
                await _read(connection, listener)
        except TimeoutError:
            pass  # `drop` expired the timeout
        except (OSError, RedisError) as lost:
            log.warning("valkey_lost", **self._reason, reason=_reason(lost))
        finally:
            self._leash = None


async def _close(connection: AbstractConnection) -> None:
    """Close without yielding to the event loop, so that a cancelled task can close, too."""
    with suppress(OSError, RedisError):
        await connection.disconnect(nowait=True)


async def _greet(connection: AbstractConnection) -> None:
    await connection.send_command("PING", check_health=False)
    if await connection.read_response() != b"PONG":
        raise ValkeyError("the greeting was not answered as Valkey does")


async def _write(connection: AbstractConnection, commands: asyncio.Queue[Sequence[Word]]) -> None:
    """Send commands until one fails. redis-py then closes the connection, which ends `_read`.

    Commands that wait are sent in one write, because a write costs as much as ten commands.
    """
    with suppress(OSError, RedisError):
        while True:
            batch = [await commands.get()]
            while not commands.empty():
                batch.append(commands.get_nowait())
            await connection.send_packed_command(
                connection.pack_commands(batch), check_health=False
            )


async def _read(connection: AbstractConnection, listener: ValkeyListener) -> None:
    """Pass every reply to the listener, until the connection ends with an error."""
    while True:
        try:
            reply: object = await connection.read_response()
        except ResponseError as error:
            listener.refused(error)
        else:
            listener.replied(reply)


def _reason(error: BaseException) -> str:
    """Return an error's type and its text."""
    return f"{type(error).__name__}: {error}"
