"""A request of this worker to itself, answered by the same handlers without a socket.

Background work for clients runs as an in-process request. The request uses HTTP/1.0, whose bodies
have no chunk frames.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import HttpVersion10, StreamReader, hdrs, web
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway.server.body import BodyBudget
from gateway.server.identity import CallerIdentity, give_identity

_HEAD_END = b"\r\n\r\n"


class BodySink(asyncio.WriteTransport):
    """A transport that passes on the body of a response, without the head."""

    def __init__(self, take: Callable[[bytes], None], *, is_behind_head: bool = False) -> None:
        """Pass on the body of a response.

        Args:
            take: Receives the body as it is written, and never blocks.
            is_behind_head: Whether the head was sent elsewhere.
        """
        super().__init__()
        self._take = take
        self._is_closed, self._is_behind_head = False, is_behind_head

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Pass the body's bytes to `take`."""
        body = bytes(data)
        if not self._is_behind_head:
            self._is_behind_head = True
            body = body.partition(_HEAD_END)[2]
        if body:
            self._take(body)

    def get_write_buffer_size(self) -> int:
        """Return 0, because no bytes wait here."""
        return 0

    def is_closing(self) -> bool:
        """Return whether writes are ignored from now on."""
        return self._is_closed

    def abort(self) -> None:
        """Ignore all further writes."""
        self._is_closed = True


class _SinkWriter:
    """Replaces aiohttp's writer of a response."""

    output_size = buffer_size = 0
    length: int | None = None

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    async def write_headers(self, status_line: str, headers: object) -> None:
        """Skip the head, because the caller in this process reads only the body."""
        del status_line, headers
        self._transport.write(_HEAD_END)

    def send_headers(self) -> None:
        """Do nothing, because headers are never sent late."""

    async def write(self, chunk: bytes, **_: object) -> None:
        """Write a piece of the body to the sink."""
        self._transport.write(chunk)

    async def write_eof(self, chunk: bytes = b"") -> None:
        """Write the last piece of the body to the sink."""
        if chunk:
            self._transport.write(chunk)

    async def drain(self) -> None:
        """Return at once, because no buffer separates writer and reader."""


class _InProcess:
    """The connection of an in-process request, without a socket."""

    ssl_context = peername = sockname = None
    access_log = None
    writing_paused = _reading_paused = False
    connected = True

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self.transport = transport
        self.body_budget = BodyBudget(0)

    def resume_reading(self, *, resume_parser: bool = True) -> None:
        """Do nothing, because the body is complete already."""


def in_process_request(
    path: str,
    body: bytes,
    sink: asyncio.WriteTransport,
    identity: CallerIdentity,
    *,
    said_bytes: int | None = None,
) -> web.Request:
    """Return a POST request of this worker to itself.

    Args:
        path: Path of the endpoint.
        body: JSON body.
        sink: Receives the body of a streamed response.
        identity: Ids of the request.
        said_bytes: Declared bytes of a body that was read already, or None for its actual length.
    """
    loop = asyncio.get_running_loop()
    connection: Any = _InProcess(sink)
    writer: Any = _SinkWriter(sink)
    task: Any = asyncio.current_task()
    length = len(body) if said_bytes is None else said_bytes
    headers = CIMultiDictProxy(CIMultiDict({hdrs.CONTENT_LENGTH: str(length)}))
    message = RawRequestMessage(
        method=hdrs.METH_POST,
        path=path,
        version=HttpVersion10,
        headers=headers,
        raw_headers=(),
        should_close=True,
        compression=None,
        upgrade=False,
        chunked=False,
        url=URL(path),
    )
    payload = StreamReader(connection, len(body) + 1, loop=loop)  # it has room for the whole body
    payload.feed_data(body)
    payload.feed_eof()
    request = web.Request(
        message,
        payload,
        connection,
        writer,
        task,
        loop,
    )
    give_identity(request, identity)
    return request
