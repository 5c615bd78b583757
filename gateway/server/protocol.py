"""The HTTP/1.1 server, which adds bounds on connections and waits to aiohttp's protocol.

The names with an underscore are private names of aiohttp. It has no other hook for a parser's
errors, for the state of a connection or for the request of a connection. If aiohttp changes these
names, `tests/integration/gateway/test_hostile.py` and
`tests/unit/gateway/test_protocol.py` fail.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.http_writer import StreamWriter
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import ERROR, RequestHandler

from gateway.bodies.parsing import BODY_BYTES_MAX
from gateway.server.body import BodyBudget, content_length
from gateway.server.bounds import (
    LINGER_S,
    STALLED_S,
    SURPLUS_CONNECTIONS,
    ServerLimits,
    too_many_connections,
)
from gateway.server.deadlines import Deadlines
from gateway.server.errors import HttpError, body_of, raw_response
from gateway.server.malformed import (
    FIELD_BYTES_MAX,
    FIELDS_MAX,
    HEAD_BYTES_MAX,
    LINE_BYTES_MAX,
    malformed,
)
from gateway.server.request import HttpRequest
from gateway.server.routes import Handler
from sluice.errors import ErrorCode, PlatformError
from sluice.ids import new_id

if TYPE_CHECKING:
    from gateway.server.other_version import OtherVersion

log = structlog.get_logger(__name__)

SERVER_NAME = "sluice"  # aiohttp's default would reveal its version and Python's
UNKNOWN_VERSION = web.RequestKey("unknown_version", bool)
_VERSIONS = (HttpVersion11, HttpVersion10)
_AnyHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_HEAD_END = b"\r\n\r\n"
_UNKNOWN = -1
_BEGINNINGS = frozenset({b"P", b"PR", b"PRI"})  # first bytes of connections that may be HTTP/2


class HttpServer(web.Server):
    """Creates a protocol for each connection, and lists all open connections."""

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits,
        note_malformed: Callable[[PlatformError, str], None],
    ) -> None:
        """All connections share these arguments.

        Args:
            handler: Answers requests, and raises only cancellation and connection errors.
            limits: Limits of this worker.
            note_malformed: Called with error and request id of each answer to a malformed request.
        """
        # `handler_cancellation` is off by default. Without it, a handler that waits for the next
        # token would not notice that its client has closed the connection.
        super().__init__(
            handler,  # pyright: ignore[reportArgumentType] - the factory creates its type
            request_factory=self.make_request,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=0.0,  # no timer per connection, because `idle` replaces it
            max_line_size=LINE_BYTES_MAX,
            max_field_size=FIELD_BYTES_MAX,
            max_headers=FIELDS_MAX,
        )
        self._limits = limits
        self.body_budget = BodyBudget(limits.body_bytes_max)
        self.note_malformed = note_malformed
        self.heads = Deadlines(limits.head_timeout_s, self._loop, HttpProtocol.head_timed_out)
        self.idle = Deadlines(limits.idle_timeout_s, self._loop, HttpProtocol.idle_timed_out)
        self.is_draining = False
        self.other_version: OtherVersion | None = None

    def __call__(self) -> RequestHandler:
        """Return the protocol of a new connection."""
        return HttpProtocol(self, loop=self._loop, **self._kwargs)

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        other = 0 if self.other_version is None else self.other_version.open_connections
        return len(self._connections) + other

    @property
    def has_requests(self) -> bool:
        """Whether a request is being answered on any connection."""
        if self.other_version is not None and self.other_version.has_requests:
            return True
        connections = (c for c in self._connections if isinstance(c, HttpProtocol))
        return any(connection.is_busy for connection in connections)

    @property
    def body_bytes(self) -> int:
        """Bytes of unfinished bodies."""
        return self.body_budget.held_bytes

    @property
    def surplus(self) -> int:
        """Number of connections above the bound."""
        return self.open_connections - self._limits.connections_max

    def hands_over(self, connection: "HttpProtocol", data: bytes) -> bool:
        """Return whether the server of another HTTP version has taken over a new connection."""
        other = self.other_version
        return other is not None and connection in self.heads and other.take(connection, data)

    def make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> HttpRequest:
        """Return the aiohttp request for a parsed message."""
        if self.is_draining:  # Each answer closes its connection, so that clients reconnect.
            message = message._replace(should_close=True)
        is_unknown_version = message.version not in _VERSIONS
        if is_unknown_version:  # The answer uses the oldest version that this server supports.
            message = message._replace(version=HttpVersion10, should_close=True)
        request = HttpRequest(
            message, payload, protocol, writer, task, self._loop, client_max_size=BODY_BYTES_MAX
        )
        if is_unknown_version:
            request[UNKNOWN_VERSION] = True
        return request


class HttpProtocol(RequestHandler):
    """One connection of a client over HTTP/1.1."""

    __slots__ = (
        *("_answering", "_head_bytes", "_rest", "_server", "_stalled", "is_surplus"),
        "note_upgraded",
    )

    def __init__(self, server: HttpServer, **options: object) -> None:
        """The `options` are those of aiohttp's protocol."""
        super().__init__(server, **options)  # pyright: ignore[reportArgumentType] - passed on
        self._server = server
        self._parser = None  # created after the first bytes, which may be HTTP/2
        self._answering: HttpRequest | None = None  # The request until its answer is complete.
        self._head_bytes = 0  # Received bytes of an incomplete head.
        # Missing bytes of a message that has begun, or 0 between two messages.
        self._rest = 0
        self._stalled: asyncio.TimerHandle | None = None
        self.is_surplus = False
        # Called with the length of received data after an upgrade to another protocol (WebSocket).
        # The result is whether the data is accepted.
        self.note_upgraded: Callable[[int], bool] | None = None
        # A list replaces aiohttp's deque, because messages are few and an empty deque uses 700
        # bytes more.
        self._messages = []  # pyright: ignore[reportAttributeAccessIssue] - a list does the same

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, or refuse it if far too many are open."""
        super().connection_made(transport)
        surplus = self._server.surplus
        if surplus <= 0:
            self._server.heads.begin(self)
        elif surplus <= SURPLUS_CONNECTIONS:
            self.is_surplus = True
            self._server.heads.begin(self)
        else:
            self._end_with(too_many_connections())

    def connection_lost(self, exc: BaseException | None) -> None:
        """Drop the connection."""
        self._server.heads.end(self)
        self._server.idle.end(self)
        self._stop_watching_reader()
        super().connection_lost(exc)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading if it was paused.

        aiohttp calls this method for each body that is read whole. Its own method would call parser
        and transport without need, twice per request at 5 us each. After very many chunks the
        parser stops, although reading is not paused. It then has a part of an open body, and
        continues when the next chunk is read.
        """
        if self._reading_paused or (resume_parser and self._has_open_body):
            super().resume_reading(resume_parser)

    @property
    def _has_open_body(self) -> bool:
        current = self._current_request
        return current is None or not current.content.is_eof()

    def pause_writing(self) -> None:
        """Start the deadline of a client that reads more slowly than the server writes."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop the deadline, because the client has read the buffered bytes."""
        self._stop_watching_reader()
        super().resume_writing()

    def _watch_reader(self) -> None:
        if self.transport is not None:
            waiting = self.transport.get_write_buffer_size()
            self._stalled = self._loop.call_later(STALLED_S, self._check_reader, waiting)

    def _stop_watching_reader(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _check_reader(self, waiting_before: int) -> None:
        transport = self.transport
        if transport is not None and transport.get_write_buffer_size() >= waiting_before:
            transport.abort()  # an orderly end would wait for the client, too
        else:
            self._watch_reader()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, with a deadline for a head. A broken body ends its request."""
        if self._close or self._force_close:
            return
        if self.note_upgraded is not None:
            if self.note_upgraded(len(data)):
                super().data_received(data)
            return
        if self._parser is None:
            if not data or self.transport is None:
                return  # nothing is left to parse
            if data[:3] in _BEGINNINGS and self._server.hands_over(self, data):
                return
            self._parser = self._new_parser()
        messages, queued, is_head = self._messages, len(self._messages), self._is_between
        super().data_received(data)
        self._count_down(data, len(messages) - queued)
        if len(messages) > queued:
            self._server.heads.end(self)
            self._head_bytes = 0
            if isinstance(getattr(messages[-1][0], "exc", None), HttpProcessingError):
                self._note_parser_error()
        elif data and is_head and not (self._buffer_paused or self._upgraded):
            self._note_head(len(data))

    @property
    def _is_between(self) -> bool:
        """Whether all requests so far are complete, so that the next bytes begin a head."""
        if self._messages:
            return self._messages[-1][1].is_eof()
        if self._answering is not None:
            return self._answering.content.is_eof()
        return self._waiter is not None

    def _note_head(self, size: int) -> None:
        """Count a part of a head, which may arrive while the previous request is answered."""
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            if self.is_busy:
                self.force_close()
            else:
                text = f"The request's head is longer than {HEAD_BYTES_MAX} bytes."
                self._end_with(HttpError(431, text))
        elif not self.is_busy:
            self._server.heads.begin(self)

    def _count_down(self, data: bytes, new_messages: int) -> None:
        rest = self._rest
        if rest > 0:
            self._rest = max(rest - len(data), _UNKNOWN)
        elif not rest and data:
            self._rest = _rest_of(self._messages[-1][0], data) if new_messages == 1 else _UNKNOWN

    def drop_parser(self) -> None:
        """Drop the parser if it has no bytes of a message.

        The parser references the last message's fields, which would cost each open stream 2.5 kB.
        The next request creates another parser in 1 us.
        """
        if not self._rest and not self._messages:
            self._parser = None

    def _new_parser(self) -> HttpRequestParser:
        return HttpRequestParser(
            self,
            self._loop,
            self._read_bufsize,
            max_line_size=self.max_line_size,
            max_field_size=self.max_field_size,
            max_headers=self.max_headers,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=self._max_msg_queue_size,
        )

    @property
    def body_budget(self) -> BodyBudget:
        """The byte budget of the unfinished bodies of all connections."""
        return self._server.body_budget

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered or is queued on this connection."""
        return self._request_in_progress or bool(self._messages)

    def head_timed_out(self) -> None:
        """End a connection that has not sent a whole head in time."""
        if self.is_busy or self.transport is None:
            return
        if self._head_bytes:
            self._end_with(HttpError(408, "The request's head did not arrive in time."))
        else:
            self.force_close()

    def idle_timed_out(self) -> None:
        """End a connection that was idle for the whole `idle_timeout_s`."""
        if not self.is_busy:
            self.force_close()

    # No code reads these names, because a client is identified by its key. aiohttp's attributes
    # would cost 300 bytes per connection.
    peername = None  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]
    sockname = None  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    async def start(self) -> None:
        """Answer requests sequentially, in the task that aiohttp runs for each connection.

        aiohttp's own method creates another task per request. That task references the request's
        head and body until the answer has ended.
        """
        try:
            while not self._force_close:
                if not self._messages:
                    await self._await_message()
                request, handler = self._next_request()
                self._answering = request
                try:
                    response, is_broken = await self._handle_request(request, None, handler)
                finally:
                    request.end()
                if is_broken or not await self._may_continue(request, response):
                    break
                self._answering = None
                del request, handler, response  # the silence until the next request may be long
        except ConnectionError:
            pass
        except asyncio.CancelledError:
            self.force_close()
            raise
        except Exception as error:  # noqa: BLE001 - the outermost edge
            self.log_exception("Unhandled exception", exc_info=error)
            self.force_close()
        finally:
            self._answering = None
        if not self._force_close:
            self._task_handler = None
            if self.transport is not None:
                self.transport.close()

    async def _await_message(self) -> None:
        self._waiter = self._loop.create_future()
        if self._head_bytes:  # the head began to arrive while the previous request was answered
            self._server.heads.begin(self)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _next_request(self) -> tuple[HttpRequest, _AnyHandler]:
        """Return the next request with its handler, or an error handler if it is malformed."""
        self._server.idle.end(self)
        message, payload = self._messages[0]
        del self._messages[0]
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        server, task, writer = self._server, self._task_handler, StreamWriter(self, self._loop)
        assert task is not None
        if isinstance(message, RawRequestMessage):
            handler = server.request_handler
        else:
            message, handler = ERROR, self._make_error_handler(message)
        return server.make_request(message, payload, self, writer, task), handler

    async def _may_continue(self, request: web.BaseRequest, response: web.StreamResponse) -> bool:
        """Clean up after an answer, and return whether another request may follow."""
        may_follow = bool(response.keep_alive)
        if not request.content.is_eof() and not self._force_close:
            await self._drop_rest(request.content)
        if not may_follow or self._close or self._force_close:
            return False
        self._server.idle.begin(self)
        return True

    async def _drop_rest(self, body: StreamReader) -> None:
        """Drop the rest of a request's body for a bounded time.

        Many clients read no answer before they have sent the whole body.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not body.is_eof():
                    await body.readany()
        if not body.is_eof():
            self.close()

    def _note_parser_error(self) -> None:
        """Report the parser's error to the request whose body is being read.

        aiohttp would queue the error behind that request. The request would then wait for the rest
        of its body until the timeout.
        """
        open_bodies = [payload for _, payload in self._messages if not payload.is_eof()]
        if self._request_in_progress and (current := self._current_request) is not None:
            open_bodies.append(current.content)
        for body in open_bodies:
            if not body.is_eof():
                body.set_exception(web.RequestPayloadError("broken framing"))
                body.feed_eof()
                self._messages.pop()
                self.close()
                return

    def _end_with(self, error: PlatformError) -> None:
        request_id = new_id("req")
        self._server.note_malformed(error, request_id)
        if self.transport is not None:
            self.transport.write(raw_response(error, request_id, SERVER_NAME))
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's signature
    ) -> web.StreamResponse:
        """Return the answer to a malformed request, or to the failure of a handler."""
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("the response has begun, or the client has closed the connection")
        if isinstance(exc, HttpProcessingError):
            failure = malformed(exc)
        else:  # a bug in the handler, which should answer its own errors
            log.error("handler_failed", status=status, error=type(exc).__name__)
            text = "The server had an error while processing your request; try again."
            failure = PlatformError(ErrorCode.INTERNAL, text)
        request_id = new_id("req")
        self._server.note_malformed(failure, request_id)
        response = web.Response(
            body=body_of(failure),
            status=failure.status,
            headers={"x-request-id": request_id, "Server": SERVER_NAME},
            content_type="application/json",
        )
        response.force_close()
        return response

    def log_exception(self, *args: object, **kw: object) -> None:
        """Log the error that ended a connection, without the bytes sent over it."""
        about, error = str(args[0]) if args else "", type(kw.get("exc_info")).__name__
        log.warning("connection_failed", about=about, error=error)


def _rest_of(message: object, data: bytes) -> int:
    """Return how many bytes of the one message that begins in `data` have not arrived yet.

    If the number is uncertain, the result is `_UNKNOWN` or too small. The parser then stays in use.
    """
    if not isinstance(message, RawRequestMessage) or message.chunked or message.upgrade:
        return _UNKNOWN
    length = content_length(message.headers)
    if length is None:
        return _UNKNOWN
    return max(data.find(_HEAD_END) + len(_HEAD_END) + length - len(data), _UNKNOWN)
