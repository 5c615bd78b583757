"""How much a client may send that asks for nothing: pings, settings, windows, resets. Pure.

Each frame costs some 20 us, whatever it is for. A client pays for its frames from a purse. Answers
fill it: the more a client is sent, the more it has to acknowledge.
"""

from collections.abc import Iterable

from gateway.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    FrameHead,
)

PURSE_MAX = 4096.0  # frames at once: 80 ms of work
_PER_S = 100.0  # 2 ms of work a second
_PER_DATA = 10  # Envoy allows as many window updates per frame of data
_RESET = 8  # a request was begun for nothing
REFUSED = 4  # a request beyond the bound of streams
_SETTING_BYTES = 6
_SETTINGS_PER_FRAME = 8  # which take as long as a frame
SMALL_BYTES = 512  # DATA of a body comes in larger pieces
HEAD_BYTES_MAX = 64 << 10  # of one head, packed; `h2` bounds it unpacked


class FloodMeter:
    """The purse of one connection."""

    __slots__ = ("_at_s", "_head_bytes", "_purse")

    def __init__(self, now_s: float) -> None:
        """Start with a full purse."""
        self._purse, self._at_s = PURSE_MAX, now_s
        self._head_bytes = 0  # of a head that has not all come

    @property
    def is_in_head(self) -> bool:
        """Whether the head of a request has begun and not ended."""
        return self._head_bytes > 0

    def earn(self, data_frames: int) -> None:
        """Note frames of DATA that the client was sent."""
        self._purse = min(PURSE_MAX, self._purse + _PER_DATA * data_frames)

    def pay(self, cost: float) -> None:
        """Take from the purse; `charge` tells when there is no more."""
        self._purse -= cost

    def charge(self, frames: Iterable[FrameHead], now_s: float) -> str:
        """Take the price of received frames; return why the connection has to end, or ''."""
        self._purse = min(PURSE_MAX, self._purse + (now_s - self._at_s) * _PER_S)
        self._at_s = now_s
        flaw = ""
        for frame in frames:
            self._purse -= _cost(frame)
            if frame.kind in (HEADERS, CONTINUATION):
                self._head_bytes += frame.size + 1
                if self._head_bytes > HEAD_BYTES_MAX:
                    flaw = "the head of a request is too long"
                if frame.flags & END_HEADERS:
                    self._head_bytes = 0
        return flaw or ("too many frames that ask for nothing" if self._purse < 0 else "")


def _cost(frame: FrameHead) -> float:
    kind = frame.kind
    if kind == DATA:
        return 1.0 if frame.size < SMALL_BYTES and not frame.flags & END_STREAM else 0.0
    if kind == HEADERS:
        return 0.0
    if kind == RST_STREAM:
        return _RESET
    if kind == SETTINGS:
        return 1 + frame.size / _SETTING_BYTES / _SETTINGS_PER_FRAME
    return 1.0
