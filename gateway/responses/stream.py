"""Sends the tokens of a response: as `StreamedGeneration`, with a number in each event."""

from gateway.dispatch.generation import GenerationSpec
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.streamed import StreamedGeneration
from gateway.metrics import FastHistogram
from gateway.responses.events import ResponseEvents
from gateway.text.sse import ChunkWriter


class NumberedGeneration(StreamedGeneration):
    """One answer whose events are numbered, and whose text stands in a message that is begun."""

    __slots__ = ("_events",)

    def __init__(
        self, spec: GenerationSpec, chunks: ChunkWriter, itl: FastHistogram, pace: AttemptPace
    ) -> None:
        """Prepare; `chunks` are the events of a response."""
        assert isinstance(chunks, ResponseEvents), "only these are numbered"
        super().__init__(spec, chunks, itl, pace)
        self._events = chunks

    def _send(self, fragment: bytes) -> None:
        events = self._events
        if not events.is_in_message:
            self.send(events.begin_message())
            self.take_head()
        super()._send(events.numbered(fragment))
