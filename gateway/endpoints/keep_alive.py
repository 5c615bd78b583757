"""Signs of life for clients and proxies that would give up on a silent stream."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from gateway.dispatch.streamed import StreamedGeneration


class KeepAlive:
    """While the block runs: a comment into a stream that has been silent for `every_s`.

    A stream that has not begun by then begins, so that its headers are the first sign of life.
    """

    __slots__ = ("_every_s", "_handle", "_is_begun", "_loop", "_streams")

    def __init__(self, streams: Sequence[StreamedGeneration], every_s: float) -> None:
        """Prepare; `streams` are the choices of one answer, on one connection."""
        self._streams = streams
        self._every_s = every_s
        self._is_begun = False
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        """Start the clock."""
        self._handle = self._loop.call_later(self._every_s, self._check)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop it."""
        if self._handle is not None:
            self._handle.cancel()

    def _check(self) -> None:
        last_at_s = max(stream.last_at_s for stream in self._streams)
        silent_s = time.monotonic() - last_at_s
        wait_s = self._every_s
        if not last_at_s and not self._is_begun:
            self._is_begun = True
            for stream in self._streams:
                stream.nudge()
        elif silent_s >= self._every_s:
            running = (stream for stream in self._streams if stream.ending is None)
            if (stream := next(running, None)) is not None:
                stream.keep_alive()
        else:
            wait_s -= silent_s
        self._handle = self._loop.call_later(wait_s, self._check)
