"""The HTTP/2 connections of one worker.

The connections share the port of HTTP/1.1 and are recognized by their first bytes. The maintained
HTTP/2 servers (hypercorn, granian) run ASGI applications only. This server runs aiohttp's handlers,
with the same bounds as over HTTP/1.1.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import structlog
from aiohttp.http_parser import RawRequestMessage
from h2.errors import ErrorCodes

from gateway.bodies.parsing import BODY_BYTES_MAX
from gateway.http2.connection import Http2Connection
from gateway.http2.frames import PREFACE
from gateway.http2.stream import Http2Stream, Http2Writer
from gateway.server import bounds
from gateway.server.bounds import ServerLimits
from gateway.server.deadlines import Deadlines
from gateway.server.errors import HttpError, body_of
from gateway.server.protocol import SERVER_NAME, HttpProtocol, HttpServer
from gateway.server.request import HttpRequest
from sluice.ids import new_id

log = structlog.get_logger(__name__)

_POLL_S = 0.02


class Http2Server:
    """Accepts HTTP/2 connections from the HTTP/1.1 server, and answers with that server's handler.

    Attributes:
        streams_max: Maximum number of concurrent requests on one connection.
        floods: Number of connections that were ended because they sent too many frames.
        heads: Deadlines of connections without settings, or with an incomplete head of a request.
        idle: Deadlines of connections without streams.
        stalled: Deadlines of streams whose client accepts no bytes.
        lingering: Deadlines of answered streams whose request bodies are still arriving.
    """

    def __init__(self, server: HttpServer, limits: ServerLimits, streams_max: int) -> None:
        """The `server` passes new connections to `take`."""
        self._server, self.streams_max = server, streams_max
        self._loop = loop = asyncio.get_running_loop()
        self._connections: set[Http2Connection] = set()
        self.floods = 0
        self.heads = Deadlines(limits.head_timeout_s, loop, Http2Connection.head_timed_out)
        self.idle = Deadlines(limits.idle_timeout_s, loop, Http2Connection.idle_timed_out)
        self.stalled = Deadlines(bounds.STALLED_S, loop, Http2Stream.stalled)
        self.lingering = Deadlines(bounds.LINGER_S, loop, Http2Stream.linger_over)
        self.body_budget = server.body_budget
        server.other_version = self

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    @property
    def open_streams(self) -> int:
        """Number of streams that have not ended."""
        return sum([len(it.streams) for it in self._connections])

    @property
    def has_requests(self) -> bool:
        """Whether a request is being answered."""
        return any(it.streams for it in self._connections)

    @property
    def is_draining(self) -> bool:
        """Whether the worker requests that its clients open no further streams."""
        return self._server.is_draining

    def take(self, connection: HttpProtocol, data: bytes) -> bool:
        """Take over a connection if its first bytes are HTTP/2's preface or may become the preface.

        Returns whether the connection was taken over. `_PrefaceReader` reads the rest of the
        preface.
        """
        transport = connection.transport
        assert transport is not None
        if data.startswith(PREFACE):
            connection.transport = None  # prevents the HTTP/1.1 protocol from closing the transport
            surplus = connection.is_surplus
            connection.connection_lost(None)
            made = Http2Connection(self, transport, is_surplus=surplus)
            self._connections.add(made)
            transport.set_protocol(made)
            made.begin(data)
            return True
        if PREFACE.startswith(data):
            transport.set_protocol(_PrefaceReader(connection, data))
            return True
        return False

    def forget(self, connection: Http2Connection) -> None:
        """Drop a connection that has ended."""
        self._connections.discard(connection)
        self.heads.end(connection)
        self.idle.end(connection)

    async def answer(self, stream: Http2Stream, message: RawRequestMessage) -> None:
        """Answer one request, in the same steps as aiohttp's protocol over HTTP/1.1."""
        task: Any = asyncio.current_task()
        writer, protocol = Http2Writer(stream), cast("Any", stream)
        request = HttpRequest(
            message, stream.body, protocol, writer, task, self._loop, client_max_size=BODY_BYTES_MAX
        )
        del message  # frees the message, because an answer may last an hour
        try:
            response = await self._server.request_handler(request)
            await response.prepare(request)
            await response.write_eof()
        except ConnectionError:
            stream.abort()
        except asyncio.CancelledError:
            stream.abort()
            raise
        except Exception as error:  # noqa: BLE001 - an error must end only its stream
            log.error("answer_failed", error=type(error).__name__)  # noqa: TRY400 - may have keys
            stream.abort()
        finally:
            request.end()
            stream.finish()

    def refusal(self, error: HttpError) -> tuple[int, Mapping[str, str], bytes]:
        """Return the status, fields and body of the answer to a malformed request."""
        request_id, body = new_id("req"), body_of(error)
        self._server.note_malformed(error, request_id)
        fields = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Server": SERVER_NAME,
            "x-request-id": request_id,
        }
        return error.status, fields, body

    def say_goodbye(self) -> None:
        """Request that no client opens further streams."""
        for connection in list(self._connections):
            connection.say_goodbye()

    async def close(self, timeout_s: float) -> None:
        """Close all connections. Running requests may end within `timeout_s` seconds."""
        for connection in list(self._connections):
            connection.refuse_more()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._connections:  # noqa: ASYNC110 - only at the end of the process
                    await asyncio.sleep(_POLL_S)
        for connection in list(self._connections):
            connection.end(ErrorCodes.NO_ERROR)
        for deadlines in (self.heads, self.idle, self.stalled, self.lingering):
            deadlines.close()


class _PrefaceReader(asyncio.Protocol):
    """Reads the rest of a possible HTTP/2 preface, within the deadline of a request's head."""

    def __init__(self, connection: HttpProtocol, data: bytes) -> None:
        self._connection, self._data = connection, data

    def data_received(self, data: bytes) -> None:
        self._data += data
        transport = self._connection.transport
        is_begun = len(self._data) < len(PREFACE) and PREFACE.startswith(self._data)
        if transport is not None and not is_begun:
            transport.set_protocol(self._connection)
            self._connection.data_received(self._data)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
