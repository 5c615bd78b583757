"""Writes a stream at most once per interval, for clients that do not display tokens live.

A write costs more CPU time than all other work for a token.
"""

import asyncio
from collections.abc import Callable

# Waiting bytes above which the frames are written before the interval is over.
_BYTES_MAX = 32 << 10


class IntervalWriter:
    """Collects frames until the interval since the last write is over."""

    __slots__ = ("_bytes", "_frames", "_interval_s", "_is_over", "_timer", "_write")

    def __init__(
        self, write: Callable[[bytes], None], interval_s: float, is_over: Callable[[], None]
    ) -> None:
        """Start the first interval.

        Args:
            write: Transport's function that writes bytes.
            interval_s: Seconds between two writes.
            is_over: Called at the end of each interval. The function must call `flush`.
        """
        self._write = write
        self._interval_s = interval_s
        self._is_over = is_over
        self._frames: list[bytes] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def write(self, frame: bytes) -> None:
        """Write a frame at once or when the interval is over."""
        self._frames.append(frame)
        self._bytes += len(frame)
        if self._timer is None or self._bytes > _BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write the waiting frames. If no frame waits, the next frame will be written at once."""
        self._stop_timer()
        if self._frames:
            kept = b"".join(self._frames)
            self._frames.clear()
            self._bytes = 0
            self._start_timer()
            self._write(kept)

    def close(self) -> None:
        """Write the waiting frames, and start no further interval."""
        self.flush()
        self._stop_timer()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._is_over)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
