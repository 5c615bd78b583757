"""Streams the answer of a message, whose text is split into content blocks."""

from gateway.anthropic.events import MessageEvents
from gateway.dispatch.generation import GenerationSpec
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.streamed import StreamedGeneration
from gateway.metrics import FastHistogram
from gateway.text.sse import ChunkWriter


class BlockGeneration(StreamedGeneration):
    """A streamed answer that also opens and closes the content blocks for text."""

    __slots__ = ("_events",)

    def __init__(
        self, spec: GenerationSpec, chunks: ChunkWriter, itl: FastHistogram, pace: AttemptPace
    ) -> None:
        """Start a stream. `chunks` writes its events."""
        assert isinstance(chunks, MessageEvents), "only these have blocks"
        super().__init__(spec, chunks, itl, pace)
        self._events = chunks

    def _send(self, fragment: bytes) -> None:
        if not self._events.is_in_text:
            self.send(self._events.begin_text())
            self.take_head()
        super()._send(fragment)

    def last_chunks(self, reason: str) -> bytes:
        """Return the last events, and record the stop sequence that ended the answer."""
        chunks = super().last_chunks(reason)
        self._events.stop_sequence = self.pipe.stopped_by
        return chunks
