"""A client's response whose body is written by several in-process requests in sequence."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import web

from gateway.server.live_response import LiveResponse

_HEAD_END = b"\r\n\r\n"
_DROPPED = frozenset({"date", "connection", "transfer-encoding"})


class RelayedResponse:
    """The response of one client.

    Attributes:
        headers: Headers of the first writing request, empty before that request begins.
        response: Response that the handler returns, or None while no byte has been written.
    """

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], *, is_stream: bool
    ) -> None:
        """The first writing request begins the response.

        Args:
            request: Request of the client.
            headers: Headers of the response, if no request writes any.
            is_stream: Whether bodies are written to the client. Otherwise they are dropped.
        """
        self._request, self._is_stream, self._default = request, is_stream, headers
        self._transport: asyncio.WriteTransport | None = None
        self.headers = dict[str, str]()
        self.response: LiveResponse | None = None

    def sink(self) -> "RelayedSink":
        """Return the transport for the next request that writes to the client."""
        return RelayedSink(self)

    def begin(self, head: bytes, body: bytes) -> None:
        """Begin the output of one request. The first request's head becomes the response's head.

        Raises:
            ConnectionResetError: The client has closed the connection.
        """
        if not self.headers:
            self.headers = _fields(head) if head else dict(self._default)
        if not self._is_stream:
            return
        if self.response is None:
            self.response = LiveResponse(self._request, self.headers)
            self._transport = self.response.begin(body)
        elif body:
            self.write(body)

    def write(self, body: bytes) -> None:
        """Write a piece of the body, or raise RuntimeError if the connection is closed."""
        response, transport = self.response, self._transport
        if response is None or transport is None:
            return
        transport.write(b"%x\r\n%b\r\n" % (len(body), body) if response.is_chunked else body)

    def tell(self, body: bytes) -> None:
        """Write a piece between two requests, without an error if the connection is closed."""
        if body and not self.is_closing():
            with suppress(RuntimeError):
                self.write(body)

    async def end(self, last: bytes) -> None:
        """Write the last bytes, or raise ConnectionResetError if the client has disconnected."""
        if self.response is None:
            self.begin(b"", last)
            last = b""
        assert self.response is not None, "only streams are ended"
        await self.response.end(last)

    def is_closing(self) -> bool:
        """Return whether the client has closed the connection."""
        transport = self._request.transport
        return transport is None or transport.is_closing()

    def buffered_bytes(self) -> int:
        """Return the bytes that the client has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def cut(self) -> None:
        """End the client's connection at once."""
        if self.response is not None:
            self.response.cut()


class RelayedSink(asyncio.WriteTransport):
    """The transport of one writing request, which uses HTTP/1.0 to avoid chunk frames."""

    def __init__(self, relayed: RelayedResponse) -> None:
        """The bytes are written to the client's response `relayed`."""
        super().__init__()
        self._relayed, self._has_begun = relayed, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Pass the bytes to the client's response, in place of a socket."""
        if self._has_begun:
            if data:
                self._relayed.write(bytes(data))
            return
        self._has_begun = True
        head, _, body = bytes(data).partition(_HEAD_END)
        self._relayed.begin(head, body)

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the client has not read."""
        return self._relayed.buffered_bytes()

    def is_closing(self) -> bool:
        """Return whether the client has closed the connection."""
        return self._relayed.is_closing()

    def abort(self) -> None:
        """End the client's connection at once."""
        self._relayed.cut()


def _fields(head: bytes) -> dict[str, str]:
    """Return the header fields of a head, whose first line is the status."""
    lines = [it.partition(":") for it in head.decode().split("\r\n")[1:]]
    return {name: value.strip() for name, _, value in lines if name.lower() not in _DROPPED}
