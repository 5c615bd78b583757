"""Runs HTTP servers, for the public address, the operations address and tests alike."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from gateway.server.bounds import ServerLimits
from gateway.server.protocol import HttpServer
from gateway.server.routes import Handler
from sluice.errors import PlatformError

BACKLOG = 4096
_AFTER_DRAIN_S = 2.0  # Seconds in which handlers may write their last event.
_TLS_HANDSHAKE_S = 10.0
_TLS_GOODBYE_S = 2.0
_IDLE_POLL_S = 0.02
_BUSY_POLL_S = 0.1  # longer than `_IDLE_POLL_S`, because each poll checks all connections


class HttpRunner:
    """A server from its first connection to its last."""

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits,
        note_malformed: Callable[[PlatformError, str], None],
    ) -> None:
        """The arguments are those of `HttpServer`."""
        self.server = HttpServer(handler, limits, note_malformed)
        self._runner = web.ServerRunner(self.server, shutdown_timeout=_AFTER_DRAIN_S)
        self._listener: asyncio.AbstractServer | None = None

    @property
    def is_accepting(self) -> bool:
        """Whether the server listens."""
        return self._listener is not None

    async def start(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections on a bound socket, which the server owns from now on."""
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(
            self.server,
            sock=sock,
            backlog=BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=_TLS_HANDSHAKE_S if tls else None,
            ssl_shutdown_timeout=_TLS_GOODBYE_S if tls else None,
        )

    def say_goodbye(self) -> None:
        """From now on, close each connection after its next answer."""
        self.server.is_draining = True
        if self.server.other_version is not None:
            self.server.other_version.say_goodbye()

    def stop_accepting(self) -> None:
        """Accept no more connections. Other processes may accept from the shared socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def wait_goodbyes(self, timeout_s: float) -> None:
        """Wait until all connections have ended, for at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.server.open_connections:  # noqa: ASYNC110 - aiohttp has no event
                    await asyncio.sleep(_IDLE_POLL_S)

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request is being answered, for at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.server.has_requests:  # noqa: ASYNC110 - aiohttp has no event
                    await asyncio.sleep(_BUSY_POLL_S)

    async def close(self) -> None:
        """End all connections. Running handlers may end within two seconds."""
        self.stop_accepting()
        if self.server.other_version is not None:
            await self.server.other_version.close(_AFTER_DRAIN_S)
        await self._runner.cleanup()
        self.server.heads.close()
        self.server.idle.close()


def bound_socket(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that is bound to an address, for `HttpRunner.start`.

    Args:
        host: Address or name. The first address of a name is used.
        port: Port, or 0 for any free port.
        is_shared: Whether further sockets will be bound to the same address.

    Raises:
        OSError: The address is in use, or is no address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock
