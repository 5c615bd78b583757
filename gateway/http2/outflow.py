"""The output of one connection, which writes the bytes of all streams once per event loop turn.

A router's message contains the tokens of one engine step for all answers of this worker. The tokens
are distributed in one turn, so fifty streams of a connection cost one `send()` per step.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.http2.flood import FloodMeter
from gateway.http2.frames import FRAME_BYTES_MAX, data_head

if TYPE_CHECKING:
    from h2.connection import H2Connection

    from gateway.http2.stream import Http2Stream

# Maximum number of answer bytes per write. After a write, the socket reports if its buffer is full.
WRITE_BYTES_MAX = 256 << 10
# Maximum number of unread bytes of heads and acknowledgements. Beyond it the client is
# disconnected.
UNREAD_BYTES_MAX = 1 << 20


class Http2Outflow:
    """Collects the output of one connection, and writes it once per turn of the event loop."""

    __slots__ = (
        "_due",
        "_frames",
        "_is_scheduled",
        "_loop",
        "_meter",
        "_note_moved",
        "_state",
        "_transport",
        "is_paused",
    )

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        state: "H2Connection",
        meter: FloodMeter,
        note_moved: Callable[["Http2Stream", bool], None],
    ) -> None:
        """All arguments belong to the same connection.

        Args:
            transport: Transport of the connection.
            state: State of the connection in `h2`, with its windows and with frames to send.
            meter: Receives credit for the DATA frames that are sent.
            note_moved: Called with a stream that has sent all its bytes or still waits for flow
                control. The second argument is whether the stream has sent bytes.
        """
        self._transport, self._state = transport, state
        self._meter, self._note_moved = meter, note_moved
        self._loop = asyncio.get_running_loop()
        self._due: list[Http2Stream] = []
        self._frames: list[bytes] = []
        self._is_scheduled = self.is_paused = False

    def wake(self) -> None:
        """Send at the end of this turn of the event loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.flush)

    def note_due(self, stream: "Http2Stream") -> None:
        """Send the waiting bytes and the end of a stream at the end of this turn."""
        if not stream.is_due:
            stream.is_due = True
            self._due.append(stream)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.flush)

    def add_frame(self, frame: bytes) -> None:
        """Send a frame that was written without `h2`."""
        self._frames.append(frame)
        self.wake()

    def flush(self) -> None:
        """Send everything that may be sent now."""
        self._is_scheduled = False
        transport, state = self._transport, self._state
        if transport.is_closing():
            return
        out: list[bytes | memoryview] = [state.data_to_send(), *self._frames]
        self._frames.clear()
        if self._due and not self.is_paused and self._fill(out):
            out.append(state.data_to_send())  # frames that end streams
        if sent := b"".join(out):
            transport.write(sent)
        if self.is_paused and transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            transport.abort()

    def flush_last(self) -> None:
        """Send the frames of `h2` and of the connection, and drop the bytes of streams."""
        self._due.clear()
        self.flush()

    def _fill(self, out: list[bytes | memoryview]) -> bool:
        """Add DATA frames of streams to the output, and return whether a stream has ended.

        If only some bytes of a stream fit now, the stream is appended to the queue again.
        """
        due, self._due = self._due, []
        state, left = self._state, WRITE_BYTES_MAX
        window = state.outbound_flow_control_window
        frames, has_end = 0, False
        for stream in due:
            stream.is_due = False
            peer = stream.state
            size = min(stream.size, peer.outbound_flow_control_window, window, left)
            if size > 0:
                peer.outbound_flow_control_window -= size
                window -= size
                left -= size
                frames += 1
                if size <= FRAME_BYTES_MAX:
                    out.append(data_head(size, stream.number))
                    out += stream.take(size)
                else:
                    frames += _cut(out, stream, size) - 1
            if stream.size:
                if peer.outbound_flow_control_window > 0:
                    stream.is_due = True
                    self._due.append(stream)
                self._note_moved(stream, size > 0)
            elif stream.is_answered or stream.is_behind:
                if stream.is_answered and not stream.is_sent and not stream.is_gone:
                    state.end_stream(stream.number)
                    stream.is_sent = has_end = True
                self._note_moved(stream, True)
        state.outbound_flow_control_window = window
        self._meter.earn(frames)
        if self._due and window > 0 and not left:
            self.wake()
        return has_end


def _cut(out: list[bytes | memoryview], stream: "Http2Stream", size: int) -> int:
    """Add `size` bytes of a stream as DATA frames, and return the number of frames."""
    frames = 0
    while size:
        part = min(size, FRAME_BYTES_MAX)
        out.append(data_head(part, stream.number))
        out += stream.take(part)
        size -= part
        frames += 1
    return frames
