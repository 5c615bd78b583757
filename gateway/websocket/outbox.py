"""The output of one socket, which sends all frames of one turn of the event loop in one write.

A router's message contains the tokens of one engine step for all answers of this worker. The tokens
are distributed in one turn, so a socket with fifty streams needs one write per step.
"""

import asyncio
from contextlib import suppress

from gateway.responses.stream import DeltaSink
from gateway.websocket.frames import frames_of, payload_opening, text_frame

_HEAD_END = b"\r\n\r\n"
_DELTA_END = b'"}'


class SocketOutbox:
    """Collects complete frames for one socket, and sends them."""

    __slots__ = ("_call_soon", "_frames", "_is_due", "_transport")

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        """No other writer may send text frames over the transport."""
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._frames: list[bytes] = []
        self._is_due = False

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the client has not read yet."""
        return self._transport.get_write_buffer_size()

    def add(self, frames: bytes) -> None:
        """Send frames at the end of this turn of the event loop."""
        self._frames.append(frames)
        if not self._is_due:
            self._is_due = True
            self._call_soon(self.flush)

    def flush(self) -> None:
        """Send the collected frames."""
        self._is_due = False
        frames, self._frames = self._frames, []
        if frames and not self._transport.is_closing():
            with suppress(RuntimeError):  # uvloop raises if the connection was just closed
                self._transport.write(b"".join(frames))

    def cut(self) -> None:
        """End the connection at once."""
        self._frames.clear()
        self._transport.abort()


class SocketSink(DeltaSink):
    """Accepts the events of one response like a transport, and sends them as frames."""

    def __init__(self, outbox: SocketOutbox, opening: bytes) -> None:
        """Each frame begins with `opening`, as in `frames_of`."""
        super().__init__()
        self._outbox, self._opening = outbox, opening
        self._is_closed = self._is_behind_head = False
        self._delta_head = self._delta_opening = b""

    def take_delta(self, head: bytes, rest: bytes) -> None:
        """Send one delta as a frame, as `DeltaSink` describes.

        Only the number and the text of a delta are encoded per call.
        """
        if head is not self._delta_head:
            self._delta_head = head
            self._delta_opening = payload_opening(head, self._opening)
        self._outbox.add(text_frame(b"".join((self._delta_opening, rest, _DELTA_END))))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send events as frames, without the HTTP head before the first event."""
        events = bytes(data)
        if not self._is_behind_head:
            self._is_behind_head = True
            events = events.partition(_HEAD_END)[2]
        if events:
            self._outbox.add(frames_of(events, self._opening))

    def get_write_buffer_size(self) -> int:
        """Return the unread bytes of all streams of the socket."""
        return self._outbox.waiting_bytes

    def is_closing(self) -> bool:
        """Return whether further writes are ignored."""
        return self._is_closed

    def abort(self) -> None:
        """Close the whole socket, because its client reads too slowly."""
        self._is_closed = True
        self._outbox.cut()
