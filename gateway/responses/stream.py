"""Sends the tokens of a response by a `StreamedGeneration` whose events are numbered."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from gateway.dispatch.generation import GenerationSpec
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.streamed import StreamedGeneration
from gateway.metrics import FastHistogram
from gateway.responses.events import ResponseEvents
from gateway.text.sse import ChunkWriter

_TakeDelta = Callable[[bytes, bytes], None]


class DeltaSink(asyncio.WriteTransport, ABC):
    """A transport that encodes deltas itself, and can send many deltas in one write."""

    @abstractmethod
    def take_delta(self, head: bytes, rest: bytes) -> None:
        """Send a delta.

        Args:
            head: Bytes before the event's number, the same object for all deltas of a message.
            rest: The bytes from the number on.
        """


class NumberedGeneration(StreamedGeneration):
    """A streamed answer with numbered events, whose text is written into an open message."""

    __slots__ = ("_events", "_take_delta")

    def __init__(
        self, spec: GenerationSpec, chunks: ChunkWriter, itl: FastHistogram, pace: AttemptPace
    ) -> None:
        """The `chunks` are the events of a response."""
        assert isinstance(chunks, ResponseEvents), "only these are numbered"
        super().__init__(spec, chunks, itl, pace)
        self._events = chunks
        self._take_delta: _TakeDelta | None = None

    def go_live(self, transport: asyncio.WriteTransport, *, is_chunked: bool) -> None:
        """Write to the transport from now on. A `DeltaSink` encodes the deltas itself."""
        super().go_live(transport, is_chunked=is_chunked)
        if isinstance(transport, DeltaSink) and self._interval is None:
            self._take_delta = transport.take_delta

    def stop_writing(self) -> bytes:
        """Stop writing to the transport, and return the bytes that were not sent."""
        self._take_delta = None
        return super().stop_writing()

    def _end_closed(self) -> None:
        """Write nothing more, until the cancelled handler ends or continues the response."""
        self._write = _drop

    def _send(self, fragment: bytes) -> None:
        events = self._events
        if events.open_text is None:
            self.send(events.begin_message())
            self.take_head()
        if self._take_delta is None:
            super()._send(events.numbered(fragment))
            return
        self._take_delta(self._head, events.numbered(fragment))
        self._until_check -= 1
        if not self._until_check:
            self._check_reader()


def _drop(frame: bytes) -> None:
    """Drop a frame of a client that has left."""
