"""Bounds the frames that cost work but carry no request (pings, settings, windows, resets). Pure.

A frame of any kind costs about 20 us. The meter deducts each frame of a client from a credit. The
credit grows over time, and with the DATA sent to the client, because a client must acknowledge the
DATA that it receives.
"""

from collections.abc import Iterable

from gateway.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    FrameHead,
)

PURSE_MAX = 4096.0  # maximum credit, in control frames, which cost 80 ms of work
_PER_S = 100.0  # credit per second, in control frames, which cost 2 ms of work
_PER_DATA = 10  # credit per DATA frame that was sent, in control frames, as in Envoy
_RESET = 8  # price of a reset, because the work for its request was wasted
REFUSED = 4  # price of a request beyond the maximum number of streams
_SETTING_BYTES = 6
_SETTINGS_PER_FRAME = 8  # settings that cost as much as one frame
# Size in bytes below which a DATA frame is charged. Frames of a normal body are larger.
SMALL_BYTES = 512
# Flaw of a frame beyond the size that the server accepts. `h2` would first store the whole frame.
TOO_LARGE = f"a frame has more than {FRAME_BYTES_MAX} bytes"
HEAD_BYTES_MAX = 64 << 10  # Compressed bytes of one head. `h2` bounds the decompressed bytes.


class FloodMeter:
    """The credit of one connection, from which the client's frames are deducted."""

    __slots__ = ("_at_s", "_head_bytes", "_purse")

    def __init__(self, now_s: float) -> None:
        """Start with full credit."""
        self._purse, self._at_s = PURSE_MAX, now_s
        self._head_bytes = 0  # received bytes of an incomplete head

    @property
    def is_in_head(self) -> bool:
        """Whether the head of a request is incomplete."""
        return self._head_bytes > 0

    def earn(self, data_frames: int) -> None:
        """Add credit for DATA frames that were sent to the client."""
        self._purse = min(PURSE_MAX, self._purse + _PER_DATA * data_frames)

    def pay(self, cost: float) -> None:
        """Deduct credit. The next `charge` reports if no credit is left."""
        self._purse -= cost

    def charge(self, frames: Iterable[FrameHead], now_s: float) -> str:
        """Deduct the price of received frames.

        Returns why the connection must end, or '' if the connection may continue.
        """
        self._purse = min(PURSE_MAX, self._purse + (now_s - self._at_s) * _PER_S)
        self._at_s = now_s
        flaw = ""
        for frame in frames:
            if frame.size > FRAME_BYTES_MAX:
                return TOO_LARGE
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
