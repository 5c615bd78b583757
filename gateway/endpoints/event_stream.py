"""The response that carries streamed answers: its beginning and its end.

What lies between them, a chunk for every token, is `dispatch.streamed`'s.
"""

import time
from collections.abc import Sequence

from aiohttp import web

from gateway.dispatch.streamed import StreamedGeneration
from gateway.server.errors import body_of
from gateway.server.live_response import LiveResponse
from gateway.text.sse import DONE, StreamHead, error_event
from sluice.errors import ErrorCode, PlatformError

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the chunks
}


class EventStream:
    """All choices of one answer, on one connection.

    Attributes:
        response: Begun by `begin`.
        streams: The choices.
        usage_head: What the chunk with the usage begins with; None: nobody asked for it.
        first_sent_at_s: Monotonic time when the first bytes left; 0 before.
    """

    __slots__ = ("_last", "first_sent_at_s", "response", "streams", "usage_head")

    def __init__(
        self,
        request: web.Request,
        headers: dict[str, str],
        streams: Sequence[StreamedGeneration],
        usage_head: StreamHead | None = None,
    ) -> None:
        """Prepare; nothing is sent before `begin`."""
        self.streams = streams
        self.usage_head = usage_head
        self._last = b""
        self.response = LiveResponse(request, _STREAM_HEADERS | headers)
        self.first_sent_at_s = 0.0

    def begin(self) -> None:
        """Send the headers and what there is; from then on the choices write by themselves.

        ConnectionResetError: the client has gone.
        """
        response, streams = self.response, self.streams
        first = [stream.chunks.first() for stream in streams]
        early = [stream.take_early() for stream in streams]
        transport = response.begin(b"".join(first + early))
        self.first_sent_at_s = time.monotonic()
        for stream in streams:
            stream.go_live(transport, is_chunked=response.is_chunked)

    def end_choice(self, index: int, reason: str) -> None:
        """Send what a choice that has ended still held back, and why it ended."""
        stream = self.streams[index]
        chunk = stream.last_chunks(reason)
        if len(self.streams) == 1:
            self._last = chunk  # leaves together with the end of the stream
        else:
            stream.send(chunk)

    async def finish(self, usage: bytes = b"") -> None:
        """End a stream that has all its choices."""
        await self._send_last(self._last + usage + DONE)

    async def fail(self, error: PlatformError) -> None:
        """End a stream with an error; one whose client does not read is cut."""
        if error.code is ErrorCode.SLOW_READER:
            self.response.cut()
            return
        await self._send_last(error_event(body_of(error)))

    async def _send_last(self, last: bytes) -> None:
        unsent = [stream.stop_writing() for stream in self.streams]
        await self.response.end(b"".join([*unsent, last]))
