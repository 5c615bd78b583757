"""A streamed response, whose head is sent together with the first bytes of its body.

aiohttp's own writer would cost a tenth of a short answer's time, for a multi-dict of headers and
two coroutines per write. `dispatch.streamed` frames the chunks in the middle of a stream.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from gateway.server.request import HttpRequest

_WRITE_TIMEOUT_S = 30.0
_FORGOTTEN: Mapping[str, str] = {}
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class HeadTransport(asyncio.WriteTransport):
    """A transport that accepts the head of an answer as fields, and then the unframed body."""

    def begin_answer(self, status: int, fields: Mapping[str, str]) -> None:
        """Send the head of an answer, or raise ValueError if a field has an invalid character."""
        raise NotImplementedError


class LiveResponse(web.StreamResponse):
    """A response with status 200 and a body of unknown length.

    Under HTTP/1.0 the end of the connection marks the end of the body.

    Attributes:
        is_chunked: Whether the body is sent in the chunks of HTTP/1.1.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        """The first bytes are sent by `begin`."""
        super().__init__()
        self._request = request
        self._fields = headers
        self._has_begun = False
        self._successor: asyncio.WriteTransport | None = None
        self.is_chunked = request.version == HttpVersion11

    @property
    def prepared(self) -> bool:
        """Whether the head was sent."""
        return self._has_begun

    @property
    def keep_alive(self) -> bool:
        """Whether another request may follow on the connection."""
        return self.is_chunked and self._request.keep_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Do nothing, because `begin` sends the head. aiohttp calls this for all responses."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing, because `end` sends the rest. aiohttp calls this method for all responses."""

    def begin(self, first: bytes) -> asyncio.WriteTransport:
        """Send the head and the first bytes, and return the transport for the rest.

        Raises:
            ConnectionResetError: The client has closed the connection.
            ValueError: A header has an invalid character.
        """
        transport = self._transport()
        if isinstance(transport, HeadTransport):
            transport.begin_answer(200, {**self._fields, "Date": _date(int(time.time()))})
            transport.write(first)
        else:
            head = _head(self._fields, is_chunked=self.is_chunked, keep_alive=self.keep_alive)
            transport.write(head + self._framed(first) if first else head)
        self._has_begun, self._fields = True, _FORGOTTEN
        self._request.writer.output_size += 1
        if isinstance(self._request, HttpRequest):
            self._request.forget()
        return transport

    async def end(self, last: bytes) -> None:
        """Send the rest of the body, and close the connection if the client reads it too slowly.

        Raises:
            ConnectionResetError: The client has closed the connection.
        """
        if self._successor is not None:
            self._successor.write(last)
            return
        end = b"0\r\n\r\n" if self.is_chunked else b""
        self._transport().write(self._framed(last) + end)
        if self._request.protocol.writing_paused:
            try:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await self._request.writer.drain()
            except TimeoutError:
                self.cut()

    @property
    def is_lost(self) -> bool:
        """Whether the client has closed the connection."""
        transport = self._request.transport
        return transport is None or transport.is_closing()

    def move_to(self, transport: asyncio.WriteTransport) -> None:
        """Write the rest of the body to another transport, because the client has left."""
        self._successor, self.is_chunked = transport, False

    def cut(self) -> None:
        """End the connection at once."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def _framed(self, body: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(body), body) if self.is_chunked else body

    def _transport(self) -> asyncio.WriteTransport:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client hung up")
        return transport


def _head(fields: Mapping[str, str], *, is_chunked: bool, keep_alive: bool) -> bytes:
    if _FORBIDDEN.search("".join(fields.values())) is not None:
        raise ValueError("a header holds a control character")
    lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
    if not is_chunked:
        lines.insert(0, "HTTP/1.0 200 OK\r\n")
    else:
        lines.insert(0, "HTTP/1.1 200 OK\r\n")
        lines.append("Transfer-Encoding: chunked\r\n")
        if not keep_alive:
            lines.append("Connection: close\r\n")
    lines.append(f"Date: {_date(int(time.time()))}\r\n\r\n")
    return "".join(lines).encode()


@lru_cache(maxsize=1)
def _date(unix_s: int) -> str:
    return formatdate(unix_s, usegmt=True)
