"""One HTTP/2 request with its answer. For its handler, the stream acts as a separate connection."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp.abc import AbstractStreamWriter
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from multidict import CIMultiDict

from gateway.server.body import BodyBudget
from gateway.server.live_response import HeadTransport

if TYPE_CHECKING:
    from h2.stream import H2Stream

# Number of waiting bytes above which a writer pauses. The writer resumes at half of the number.
_WRITE_BYTES = 64 << 10


class Http2Stream(HeadTransport):
    """A stream, which acts as both the connection and the transport of its request.

    Written bytes wait here for the end of the event loop's turn, for the client's flow-control
    windows, and for the socket. The number of waiting bytes shows how slow the client is, like the
    size of a socket's buffer over HTTP/1.1.

    Attributes:
        number: Number of the stream.
        state: State of the stream in `h2`, with the client's window.
        body: Body of the request.
        task: Task that answers the request, or None after the task has ended.
        size: Number of waiting bytes.
        is_due: Whether the connection has scheduled the waiting bytes to be sent.
        is_behind: Whether bytes have waited for longer than one turn of the event loop.
        is_answered: Whether the whole answer was written.
        is_sent: Whether the end of the answer was sent to the client.
        is_heard: Whether the client has sent the whole request.
        is_gone: Whether the client accepts no more bytes.
    """

    __slots__ = (
        "_connection",
        "_drained",
        "_parts",
        "_unread",
        "body",
        "is_answered",
        "is_behind",
        "is_due",
        "is_gone",
        "is_heard",
        "is_sent",
        "number",
        "size",
        "state",
        "task",
    )

    # aiohttp reads these attributes of a request's connection. Clients are identified by their
    # keys, so the attributes are empty.
    ssl_context = peername = sockname = access_log = None
    _reading_paused = False

    def __init__(self, connection: Any, number: int, state: "H2Stream", *, has_body: bool) -> None:
        """The `connection` is the `Http2Connection` of the stream."""
        super().__init__()
        self._connection, self.number, self.state = connection, number, state
        self._parts: deque[bytes | memoryview] = deque()
        self._drained: asyncio.Future[None] | None = None
        self._unread = self.size = 0
        self.task: asyncio.Task[None] | None = None
        self.is_due = self.is_behind = False
        self.is_answered = self.is_sent = self.is_gone = False
        self.is_heard = not has_body
        # The reader calls `resume_reading` whenever all received bytes were read.
        self.body: StreamReader = (
            StreamReader(self, 1, loop=asyncio.get_running_loop())  # pyright: ignore[reportArgumentType] - only `resume_reading` is used
            if has_body
            else EMPTY_PAYLOAD
        )

    # --- the connection of a request --------------------------------------------------------

    @property
    def transport(self) -> "Http2Stream | None":
        """The stream itself, or None after the client has left."""
        return None if self.is_gone else self

    @property
    def connected(self) -> bool:
        """Whether the client still accepts bytes."""
        return not self.is_gone

    @property
    def body_budget(self) -> BodyBudget:
        """The byte budget of all unfinished request bodies of the worker."""
        return self._connection.body_budget

    @property
    def is_surplus(self) -> bool:
        """Whether the connection exceeds the worker's maximum number of connections."""
        return self._connection.is_surplus

    @property
    def writing_paused(self) -> bool:
        """Whether the client reads more slowly than the answer is written."""
        return self.size > _WRITE_BYTES

    def drop_parser(self) -> None:
        """Drop the body after it was read.

        The connection's parser stays, because it serves all requests of the connection.
        """
        self.body = EMPTY_PAYLOAD

    def pause_reading(self) -> None:
        """Do nothing, because the stream's flow-control window stops the client."""

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: ARG002 - aiohttp's name
        """Return flow-control credit to the client for the body bytes that were read."""
        unread, self._unread = self._unread, 0
        if unread:
            self._connection.acknowledge(self.number, unread)

    # --- its transport ----------------------------------------------------------------------

    def begin_answer(self, status: int, fields: Mapping[str, str]) -> None:
        """Send the head of the answer as HTTP/2 fields."""
        self._connection.send_head(self.number, status, fields.items())

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, or raise RuntimeError if the client has left."""
        if self.is_gone:
            raise RuntimeError("the stream is closed")
        self._parts.append(data)  # pyright: ignore[reportArgumentType] - it is never changed later
        self.size += len(data)
        if not self.is_due:
            self._connection.note_due(self)

    def get_write_buffer_size(self) -> int:
        """Return the number of waiting bytes."""
        return self.size

    def is_closing(self) -> bool:
        """Return whether the client accepts nothing more."""
        return self.is_gone

    def close(self) -> None:
        """End the stream at once, as `abort` does."""
        self.abort()

    def abort(self) -> None:
        """End the stream without sending the rest of its answer."""
        if not self.is_gone:
            self._connection.reset(self)

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return information on the client's connection, by name."""
        return self._connection.extra_info(name, default)

    async def drain(self) -> None:
        """Wait until most waiting bytes were sent to the client."""
        while self.size > _WRITE_BYTES and not self.is_gone:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    # --- the interface that its connection uses ---------------------------------------------

    def receive(self, data: bytes, credit: int) -> None:
        """Receive a piece of the body that used up `credit` bytes of the client's window."""
        self._unread += credit
        if data and not self.is_answered and not self.body.is_eof():
            self.body.feed_data(data)
        else:
            self.resume_reading()

    @property
    def has_ended(self) -> bool:
        """Whether the stream has ended in both directions and its task has ended."""
        return self.task is None and (self.is_gone or (self.is_sent and self.is_heard))

    def begin(self, work: Coroutine[None, None, None]) -> None:
        """Run the task that answers. `finish` is called even if the task never starts."""
        self.task = asyncio.get_running_loop().create_task(work)
        self.task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        del task
        self.finish()

    def finish(self) -> None:
        """Send the end of the answer."""
        self._connection.finish(self)

    def stalled(self) -> None:
        """End the stream, because its client has accepted no bytes for `STALLED_S` seconds."""
        self._connection.stream_stalled(self)

    def linger_over(self) -> None:
        """End the stream, because its request body is still arriving long after the answer."""
        self._connection.stream_lingers(self)

    def end_body(self) -> None:
        """End the body, which is complete."""
        self.is_heard = True
        if not self.body.is_eof():
            self.body.feed_eof()

    def take(self, size: int) -> list[bytes | memoryview]:
        """Remove and return at most `size` waiting bytes."""
        parts = self._parts
        if self.size <= size:
            taken = list(parts)
            parts.clear()
            self.size = 0
        else:
            taken = []
            self.size -= size
            while size:
                part = parts.popleft()
                if len(part) > size:
                    view = memoryview(part)
                    parts.appendleft(view[size:])
                    part = view[:size]
                taken.append(part)
                size -= len(part)
        if self._drained is not None and self.size <= _WRITE_BYTES // 2:
            self._wake()
        return taken

    def lose(self) -> None:
        """Drop the waiting bytes, because the client accepts nothing more."""
        self.is_gone = self.is_heard = True
        self._parts.clear()
        self.size = 0
        self._wake()

    def _wake(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)


class Http2Writer(AbstractStreamWriter):
    """Writes an answer of aiohttp to a stream, with its head as fields and its body in pieces."""

    def __init__(self, stream: Http2Stream) -> None:
        """The `stream` sends the answer to the client."""
        self._stream = stream
        self.length: int | None = None

    @property
    def transport(self) -> asyncio.WriteTransport | None:
        """The stream, as the transport of its answer."""
        return self._stream.transport

    def say_continue(self) -> None:
        """Send `100 Continue`, so that a client which waits for it sends the body."""
        self._stream.begin_answer(100, {})

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Send the head."""
        status = int(status_line.split(" ", 2)[1])
        self._require_client()
        self._stream.begin_answer(status, headers)
        self.output_size += 1  # shows aiohttp that the answer has begun

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Send a piece of the body, and wait while too many bytes are unsent."""
        self._send(chunk)
        if self._stream.writing_paused:
            await self.drain()

    async def write_eof(self, chunk: bytes = b"") -> None:
        """Send the last piece of the body."""
        if chunk:
            self._send(chunk)

    async def drain(self) -> None:
        """Wait until most waiting bytes were sent to the client."""
        await self._stream.drain()

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """Do nothing, because answers are not compressed."""

    def enable_chunking(self) -> None:
        """Do nothing, because HTTP/2 frames delimit the body."""

    def _send(self, chunk: bytes | bytearray | memoryview) -> None:
        self._require_client()
        self._stream.write(chunk)
        self.output_size += len(chunk)

    def _require_client(self) -> None:
        if self._stream.is_gone:
            raise ConnectionResetError("the client has ended the stream")
