"""One WebSocket session, which answers each of its requests like a request over HTTP.

Each request runs as an in-process request of the caller who opened the socket. Authentication,
limits, guards, usage and traces therefore work as over HTTP.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

import structlog
from aiohttp import WSCloseCode, WSMsgType, web

from gateway.bodies.parsing import BODY_BYTES_MAX, INLINE_BYTES_MAX
from gateway.bodies.socket_messages import CreateMessage, no_text, read_message, stream_of
from gateway.directory import Principal
from gateway.dispatch.streamed import BUFFER_BYTES_MAX
from gateway.responses.local_turns import LocalTurns
from gateway.server.answer_counts import AnswerCounts
from gateway.server.body import BYTES_PER_S_MIN, GRACE_S, BodyBudget
from gateway.server.identity import identity_of, identity_of_part
from gateway.server.in_process import in_process_request
from gateway.server.middleware import give_principal, outcome_of
from gateway.websocket.frames import close_frame, error_frame, opening_of
from gateway.websocket.lanes import Lanes
from gateway.websocket.outbox import SocketOutbox, SocketSink
from sluice.errors import BadRequestError, ErrorCode, PlatformError, RejectedError

log = structlog.get_logger(__name__)

ENDPOINT = "/v1/responses"
SOCKET_S = 3600.0  # Seconds for which a socket accepts requests.
LAST_S = 600.0  # Further seconds in which running responses may end.
# Bytes of frame heads around a message, and of control frames between messages.
_STRAY_BYTES = 4096
_CLOSE_S = 5.0
_MESSAGES = frozenset({WSMsgType.TEXT, WSMsgType.BINARY})
_EXPIRED = "websocket_connection_limit_reached"
_LOST = "previous_response_not_found"
_PREVIOUS = "previous_response_id"
_PASSING = frozenset({429, 503})

Answer = Callable[
    [web.Request, Principal, CreateMessage, LocalTurns], Awaitable[web.StreamResponse]
]


class SocketSession:
    """The session of an open socket."""

    def __init__(
        self,
        socket: web.WebSocketResponse[bool],
        request: web.Request,
        *,
        answer: Answer,
        caller: Callable[[web.Request], Principal],
        counts: AnswerCounts,
        turns: LocalTurns,
        budget: BodyBudget,
    ) -> None:
        """The socket is open, and `run` reads its messages.

        Args:
            socket: The socket.
            request: Request that opened the socket.
            answer: Answers one request of the socket.
            caller: Authenticates the socket's key again, and returns the caller.
            counts: Counts answered requests.
            turns: Responses that exist only in this socket's memory.
            budget: The worker's byte budget of unfinished messages.
        """
        transport = request.transport
        assert transport is not None
        self._socket, self._request = socket, request
        self._answer_one, self._caller, self._counts = answer, caller, counts
        self._turns, self._budget = turns, budget
        self._outbox = SocketOutbox(cast("asyncio.WriteTransport", transport))
        self._lanes: Lanes[_Work] = Lanes(budget)
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._number = self._unread = 0
        self._unread_since_s = 0.0
        self._end: _SocketEnd | None = None
        self._is_deaf = self._is_closed = False
        self._timer = asyncio.get_running_loop().call_later(SOCKET_S, self._expire)

    async def run(self) -> None:
        """Answer requests until the client or the server closes the socket."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._receive()
                finally:
                    self._tasks = None
                    for task in self._running:
                        task.cancel()
        finally:
            self._timer.cancel()
            self._turns.close()
            self._lanes.close()
            self._budget.release(self._unread)
            self._unread = 0

    def note_bytes(self, size: int) -> bool:
        """Count received bytes of a message, and return whether the message is still accepted.

        A message has a maximum size and a minimum speed, like a body over HTTP. The rest of a
        message that is too large is received and dropped. If the socket closed at once, the client
        could not read the reason.
        """
        now_s = time.monotonic()
        if self._is_deaf:
            return False
        if not self._unread:
            self._unread_since_s = now_s
        try:
            self._budget.take(size)
        except RejectedError as error:
            self._stop_reading(WSCloseCode.TRY_AGAIN_LATER, error)
            return False
        self._unread += size
        if self._unread > BODY_BYTES_MAX + _STRAY_BYTES:
            text = "The message is larger than the 4 MiB that this server takes."
            error = BadRequestError(ErrorCode.REQUEST_TOO_LARGE, text)
            self._stop_reading(WSCloseCode.MESSAGE_TOO_BIG, error)
            return False
        is_late = now_s - self._unread_since_s > GRACE_S + self._unread / BYTES_PER_S_MIN
        if self._unread > _STRAY_BYTES and is_late:
            self._outbox.cut()
        return True

    def drain(self) -> None:
        """Close the socket after its running responses, so that the client opens another socket."""
        text = "The server is stopping; connect again, and another one answers."
        error = RejectedError(ErrorCode.DRAINING, text, retry_after_s=1.0)
        self._refuse_all(_SocketEnd(WSCloseCode.SERVICE_RESTART, error))

    def _expire(self) -> None:
        text = "A socket takes requests for 60 minutes; open another one."
        error = RejectedError(ErrorCode.DRAINING, text, retry_after_s=1.0)
        if self._end is None:
            self._outbox.add(error_frame(error, opening_of(None), code=_EXPIRED))
        self._refuse_all(_SocketEnd(WSCloseCode.GOING_AWAY, error, _EXPIRED))
        self._timer = asyncio.get_running_loop().call_later(LAST_S, self._outbox.cut)

    def _stop_reading(self, close_code: int, error: PlatformError) -> None:
        self._is_deaf = True
        self._refuse(error, None)
        self._close(close_code)

    def _refuse_all(self, end: "_SocketEnd") -> None:
        if self._end is None:
            self._end = end
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._end is not None and not self._lanes.open:
            self._close(self._end.close_code)

    def _close(self, code: int) -> None:
        """Send the close frame, and wait at most `_CLOSE_S` seconds for the client's answer."""
        if not self._is_closed:
            self._is_closed = True
            self._outbox.add(close_frame(code))
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(_CLOSE_S, self._outbox.cut)

    # --- messages ---------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            message = await self._socket.receive()
            self._budget.release(self._unread)
            self._unread = 0
            if self._is_closed and message.type in _MESSAGES:
                continue  # the client had not yet received the close frame
            if message.type is WSMsgType.TEXT:
                await self._take(cast("bytes", message.data))
            elif message.type is WSMsgType.BINARY:
                self._refuse(no_text(), None)
            else:
                return
            del message  # frees the body before the next message arrives

    async def _take(self, message: bytes) -> None:
        self._number += 1
        try:
            if len(message) <= INLINE_BYTES_MAX:
                wanted = read_message(message)
            else:
                wanted = await asyncio.to_thread(read_message, message)
        except PlatformError as error:
            self._refuse(error, stream_of(message))
            return
        work = _Work(wanted, len(message), self._number)
        if self._end is not None:
            self._refuse(self._end.error, wanted.stream_id, self._end.code)
            return
        try:
            is_first = self._lanes.add(wanted.stream_id, work, len(message))
        except PlatformError as error:
            self._refuse(error, wanted.stream_id)
            return
        if is_first and self._tasks is not None:
            running = self._tasks.create_task(self._work(wanted.stream_id, work))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    def _refuse(
        self, error: PlatformError, stream_id: str | None, code: str = "", number: int = 0
    ) -> None:
        """Send an error for a message that is not answered.

        `number` is the number of the message, by default of the latest message.
        """
        request_id = f"{identity_of(self._request).request_id}-{number or self._number}"
        self._counts.note(ENDPOINT, error.status, error.code, request_id, time.monotonic())
        self._outbox.add(
            error_frame(error, opening_of(stream_id), code=code, request_id=request_id)
        )
        if self._outbox.waiting_bytes > BUFFER_BYTES_MAX:
            self._outbox.cut()  # the client sends requests without reading answers

    # --- answers ----------------------------------------------------------------------------

    async def _work(self, stream_id: str | None, first: "_Work") -> None:
        """Answer the requests of one stream sequentially."""
        work: _Work | None = first
        del first
        is_first = True
        while work is not None:
            if is_first or self._end is None:
                answering = self._answer(work, stream_id)
                del work  # frees the body while its answer streams
                await answering
            else:
                self._refuse(self._end.error, stream_id, self._end.code, work.number)
            is_first = False
            work = self._lanes.next(stream_id)
        self._close_if_idle()

    async def _answer(self, work: "_Work", stream_id: str | None) -> None:
        """Answer one request. An error is sent to the client, and the socket stays open."""
        opening, started_at_s = opening_of(stream_id), time.monotonic()
        identity = identity_of_part(self._request, work.number)
        sink = SocketSink(self._outbox, opening)
        request = in_process_request(ENDPOINT, b"", sink, identity, said_bytes=work.size)
        continued = work.wanted.previous_response_id or ""
        error: PlatformError | None = None
        try:
            principal = self._caller(self._request)
            give_principal(request, principal)
            answering = self._answer_one(request, principal, work.wanted, self._turns)
            del work, principal  # frees the body while its answer streams
            await answering
        except PlatformError as refusal:
            error = refusal
        except (asyncio.CancelledError, ConnectionError):
            self._note(request, ErrorCode.CLIENT_CLOSED, started_at_s)
            raise
        except Exception:  # the outermost edge, where one failed request must not end the socket
            log.exception("socket_request_failed", request_id=identity.request_id)
            error = PlatformError(ErrorCode.INTERNAL, "The server had an error; try again.")
        if error is None:
            self._note(request, None, started_at_s)
            return
        # After a temporary refusal the client may send the request again.
        if error.status not in _PASSING:
            self._turns.forget(continued)
        self._note(request, error.code, started_at_s)
        code = _LOST if _is_lost(error) else ""
        frame = error_frame(error, opening, code=code, request_id=identity.request_id)
        self._outbox.add(frame)

    def _note(self, request: web.Request, code: ErrorCode | None, started_at_s: float) -> None:
        """Count an ended request. `code` is its error, or None if it succeeded."""
        status = 200 if code is None else code.policy.status
        outcome = outcome_of(request, status) if code is None else code
        request_id = identity_of(request).request_id
        self._counts.note(ENDPOINT, status, outcome, request_id, started_at_s)


class _SocketEnd(NamedTuple):
    """The reason why a socket accepts no more requests.

    Attributes:
        close_code: Code of the close frame.
        error: Error for each further request.
        code: Code that replaces the error's own code in the error's frame unless empty.
    """

    close_code: int
    error: PlatformError
    code: str = ""


class _Work(NamedTuple):
    """A request of a socket, with its parsed body, its size in bytes and its number."""

    wanted: CreateMessage
    size: int
    number: int


def _is_lost(error: PlatformError) -> bool:
    return error.code is ErrorCode.NOT_FOUND and error.param == _PREVIOUS
