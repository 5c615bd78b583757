"""Comments that prevent clients and proxies from closing a silent stream."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

from gateway.dispatch.streamed import StreamedGeneration
from gateway.server.deadlines import Deadlines

# Number of checks within `every_s`. A comment is late by at most one interval between checks.
_LOOKS = 4


class KeepAlives:
    """The timers of one worker's streams.

    Attributes:
        every_s: Longest silence of a stream, in seconds.
        looks: Deadlines at which streams are checked, `_LOOKS` times per `every_s`.
    """

    def __init__(self, every_s: float) -> None:
        """The timers need a running event loop."""
        self.every_s = every_s
        loop = asyncio.get_running_loop()
        self.looks: Deadlines[KeepAlive] = Deadlines(every_s / _LOOKS, loop, KeepAlive.look)


class KeepAlive:
    """Writes a comment into a stream after each long silence, while the block runs.

    If the stream has not begun by then, the comment begins it, so that the client receives headers.
    """

    __slots__ = ("_all", "_is_begun", "_sign_at_s", "_streams")

    def __init__(self, streams: Sequence[StreamedGeneration], all_: KeepAlives) -> None:
        """`streams` are the choices of one answer, which share one connection."""
        self._streams = streams
        self._all = all_
        self._is_begun = False
        self._sign_at_s = time.monotonic()

    def __enter__(self) -> None:
        """Start the timer."""
        self._all.looks.begin(self)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the timer."""
        self._all.looks.end(self)

    def look(self) -> None:
        """Write a comment if the silence has lasted for `every_s` seconds."""
        now_s = time.monotonic()
        last_at_s = max(stream.last_at_s for stream in self._streams)
        if now_s - max(last_at_s, self._sign_at_s) >= self._all.every_s:
            self._sign_at_s = now_s
            self._give_sign(is_first=not last_at_s and not self._is_begun)
        self._all.looks.begin(self)

    def _give_sign(self, *, is_first: bool) -> None:
        if is_first:
            self._is_begun = True
            for stream in self._streams:
                stream.nudge()
            return
        self._streams[0].keep_alive()  # all streams share the connection, so one comment suffices
