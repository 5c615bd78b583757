"""The frames of HTTP/2 (RFC 9113): finds them in received bytes, writes some of those sent. Pure.

`h2` reads and writes all others. It tells nothing of a frame before it has worked on it, and costs
some 20 us for each: a connection's frames are counted here, before that.
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384  # of the payload of a frame, that every peer takes
DATA, HEADERS, _PRIORITY, RST_STREAM, SETTINGS, _PUSH_PROMISE = range(6)
_PING, _GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)
END_STREAM, END_HEADERS = 0x1, 0x4  # flags
_HEAD_BYTES = 9
_HEAD = Struct("!BHBBL")  # size: its high byte, the rest of it; type, flags, stream
_END = Struct("!LL")  # last stream, error code
ANY_STREAM = 2**31 - 1


class FrameHead(NamedTuple):
    """The head of a frame: its type, its flags, and the bytes behind the head."""

    kind: int
    flags: int
    size: int


class FrameScanner:
    """Finds the heads of frames in the bytes of a connection, however they are cut."""

    __slots__ = ("_begun", "_left")

    def __init__(self) -> None:
        """Prepare; the first bytes are the preface."""
        self._begun = b""  # of a head
        self._left = len(PREFACE)

    def heads(self, data: bytes) -> Iterator[FrameHead]:
        """Yield the head of each frame whose head ends in the data; to be read to its end."""
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
    """Return the frame that ends a connection: no stream above the last one will be answered.

    `h2` would take the connection for ended, though streams below it are still to be answered.
    """
    size = _END.size + len(text)
    return _HEAD.pack(0, size, _GOAWAY, 0, 0) + _END.pack(last_stream, code) + text
