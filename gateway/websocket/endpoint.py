"""The WebSocket endpoint of responses, which is GET /v1/responses with an upgrade."""

from aiohttp import web

from gateway.directory import Directory, Principal
from gateway.responses.endpoint import Responses
from gateway.responses.local_turns import WORKER_BYTES_MAX, LocalTurns
from gateway.server.answer_counts import AnswerCounts
from gateway.server.body import BodyBudget
from gateway.server.errors import HttpError
from gateway.server.identity import identity_of
from gateway.server.middleware import authenticate
from gateway.server.protocol import HttpProtocol
from gateway.websocket.session import SocketSession
from sluice.errors import ErrorCode, RejectedError
from sluice.scopes import Scope

SOCKETS_MAX = 2048  # maximum number of open sockets per worker
_PING_S = 30.0  # seconds between pings. A client that sends no pong is disconnected.
_UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade"}


class ResponseSockets:
    """The WebSockets of one worker."""

    def __init__(self, directory: Directory, responses: Responses, counts: AnswerCounts) -> None:
        """All arguments are parts of the same worker.

        Args:
            directory: Keys and tenants.
            responses: Answers requests.
            counts: Counts answered requests.
        """
        self._directory, self._responses, self._counts = directory, responses, counts
        self._turns_budget = BodyBudget(WORKER_BYTES_MAX)
        self._open: set[SocketSession] = set()
        self._is_draining = False

    @property
    def open(self) -> int:
        """Number of open sockets."""
        return len(self._open)

    def drain(self) -> None:
        """Refuse further requests. Each socket closes after its running responses."""
        self._is_draining = True
        for session in list(self._open):
            session.drain()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer the requests of one socket until the socket is closed."""
        self._caller(request)
        socket = web.WebSocketResponse(
            max_msg_size=0,  # the session bounds the size instead
            compress=False,
            heartbeat=_PING_S,
            decode_text=False,
        )
        if not socket.can_prepare(request):
            text = "Open a WebSocket here (GET with 'Upgrade: websocket'), or use POST."
            raise HttpError(426, text, headers=_UPGRADE)
        if self._is_draining:
            text = "The server is stopping; try again, and another one answers."
            raise RejectedError(ErrorCode.DRAINING, text, retry_after_s=1.0)
        if len(self._open) >= SOCKETS_MAX:
            text = "The server has too many open sockets; try again shortly."
            raise RejectedError(ErrorCode.OVERLOADED, text, retry_after_s=1.0)
        socket.headers.update(identity_of(request).headers)
        await socket.prepare(request)
        await self._serve(socket, request)
        return socket

    async def _serve(self, socket: web.WebSocketResponse[bool], request: web.Request) -> None:
        connection = request.protocol
        assert isinstance(connection, HttpProtocol), "sockets are a client's"
        session = SocketSession(
            socket,
            request,
            answer=self._responses.answer,
            caller=self._caller,
            counts=self._counts,
            turns=LocalTurns(self._turns_budget),
            budget=connection.body_budget,
        )
        connection.note_upgraded = session.note_bytes
        self._open.add(session)
        try:
            await session.run()
        finally:
            self._open.discard(session)

    def _caller(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        return principal
