"""The response that carries streamed answers: its beginning and its end.

What lies between them, a chunk for every token, is `dispatch.streamed`'s.
"""

import asyncio
import time
from collections.abc import Sequence

from aiohttp import HttpVersion11, web

from gateway.dispatch.generation import Ending
from gateway.dispatch.streamed import StreamedGeneration
from gateway.server.errors import error_body
from gateway.text.sse import DONE, error_event
from sluice.errors import STATUS, ErrorCode

_WRITE_TIMEOUT_S = 30.0
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the chunks
}


class _Response(web.StreamResponse):
    # Headers leave together with the first chunk: one `send()` less per request.
    _send_headers_immediately = False


class EventStream:
    """All choices of one answer, on one connection.

    Attributes:
        response: Prepared by `begin`.
        first_sent_at_s: Monotonic time when the first bytes left; 0 before.
    """

    def __init__(
        self,
        request: web.Request,
        headers: dict[str, str],
        streams: Sequence[StreamedGeneration],
    ) -> None:
        """Prepare; nothing is sent before `begin`."""
        self._request = request
        self._streams = streams
        self._last = b""
        self.response = _Response(headers=_STREAM_HEADERS | headers)
        self.first_sent_at_s = 0.0

    async def begin(self) -> None:
        """Send the headers and what there is; from then on the choices write by themselves.

        ConnectionResetError: the client does not read.
        """
        request = self._request
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await self._write_first()
        except TimeoutError:
            self._cut()
            raise ConnectionResetError("the client does not read") from None
        if request.transport is not None:
            is_chunked = request.version >= HttpVersion11
            for stream in self._streams:
                stream.go_live(request.transport, is_chunked=is_chunked)

    async def _write_first(self) -> None:
        await self.response.prepare(self._request)
        first = b"".join([stream.chunks.first() for stream in self._streams])
        await self.response.write(first + self._early())
        self.first_sent_at_s = time.monotonic()
        while early := self._early():
            await self.response.write(early)

    def _early(self) -> bytes:
        return b"".join([stream.take_early() for stream in self._streams])

    def end_choice(self, index: int, reason: str) -> None:
        """Send what a choice that has ended still held back, and why it ended."""
        stream = self._streams[index]
        chunk = stream.last_chunks(reason)
        if len(self._streams) == 1:
            self._last = chunk  # leaves together with the end of the stream
        else:
            stream.send(chunk)

    async def finish(self, usage: bytes = b"") -> None:
        """End a stream that has all its choices."""
        await self._send_last(self._last + usage + DONE)

    async def fail(self, refusal: Ending) -> None:
        """End a stream with an error; one whose client does not read is cut."""
        if refusal.code is ErrorCode.SLOW_READER:
            self._cut()
            return
        body = error_body(refusal.code, refusal.message, status=STATUS[refusal.code])
        await self._send_last(error_event(body))

    async def _send_last(self, last: bytes) -> None:
        unsent = b"".join([stream.stop_writing() for stream in self._streams])
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await self.response.write_eof(unsent + last)
        except TimeoutError:
            self._cut()

    def _cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
