"""Finds the heads of HTTP/2 frames (RFC 9113) in received bytes, and writes two kinds. Pure.

The two kinds are DATA heads and GOAWAY frames. `h2` writes all other frames and reads all frames.
Reading a frame costs `h2` about 20 us before it reports the frame. This module therefore counts the
frames of a connection before `h2` reads them.
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384  # maximum payload of a frame that every peer has to accept
DATA, HEADERS, _PRIORITY, RST_STREAM, SETTINGS, _PUSH_PROMISE = range(6)
_PING, _GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)
END_STREAM, END_HEADERS = 0x1, 0x4  # frame flags
_HEAD_BYTES = 9
_HEAD = Struct("!BHBBL")  # size (high byte, low bytes), type, flags, stream
_END = Struct("!LL")  # last stream, error code
ANY_STREAM = 2**31 - 1


class FrameHead(NamedTuple):
    """The head of a frame, with the frame's type, its flags, and its payload's size in bytes."""

    kind: int
    flags: int
    size: int


class FrameScanner:
    """Finds the heads of frames in the received bytes of a connection, in pieces of any size."""

    __slots__ = ("_begun", "_left")

    def __init__(self) -> None:
        """The first received bytes must be HTTP/2's preface."""
        self._begun = b""  # first bytes of an incomplete frame head
        self._left = len(PREFACE)

    def heads(self, data: bytes) -> Iterator[FrameHead]:
        """Yield each frame head that is complete with this data.

        The scanner's position advances with the iterator, so the caller must exhaust it, or end the
        connection.
        """
        at, end = self._left, len(data)
        if self._begun:
            wanted = _HEAD_BYTES - len(self._begun)
            begun = self._begun + data[:wanted]
            if len(begun) < _HEAD_BYTES:
                self._begun = begun
                return
            self._begun = b""
            head = _read(begun, 0)
            at = wanted + head.size
            yield head
        while at + _HEAD_BYTES <= end:
            head = _read(data, at)
            at += _HEAD_BYTES + head.size
            yield head
        if at < end:
            self._begun, self._left = data[at:], 0
        else:
            self._left = at - end


def _read(data: bytes, at: int) -> FrameHead:
    high, low, kind, flags, _ = _HEAD.unpack_from(data, at)
    return FrameHead(kind, flags, (high << 16) + low)


def data_head(size: int, stream: int) -> bytes:
    """Return the head of a DATA frame of at most `FRAME_BYTES_MAX` bytes."""
    return _HEAD.pack(0, size, DATA, 0, stream)


def goaway(last_stream: int, code: int, text: bytes = b"") -> bytes:
    """Return a GOAWAY frame, which refuses all streams above `last_stream`.

    If `h2` itself wrote the GOAWAY, it would treat the connection as ended, although lower
    streams still have to be answered.
    """
    size = _END.size + len(text)
    return _HEAD.pack(0, size, _GOAWAY, 0, 0) + _END.pack(last_stream, code) + text
