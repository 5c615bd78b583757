"""Tells a frozen engine from a starved one, and both from a standstill of our own."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from sluice.procfs import cpu_s, wants_processor

_TICK_S = 0.05
_WINDOW_MIN_S = 0.01  # the kernel counts processor time in ticks of this length


class Activity:
    """What the processes of an engine did between two looks."""

    def __init__(self) -> None:
        self._looked_at_s = time.monotonic()
        self._cpu_s = 0.0

    def look(self, pids: Sequence[int], *, is_missing: bool) -> float:
        """Return how many processors the engine used since the last look.

        Args:
            pids: Its processes.
            is_missing: Whether it owes an answer. Then one that waits for a processor, or for a
                disk, counts as one that has it.
        """
        now_s, used_s = time.monotonic(), cpu_s(pids)
        window_s = max(_WINDOW_MIN_S, now_s - self._looked_at_s)
        busy = max(0.0, used_s - self._cpu_s) / window_s
        self._looked_at_s, self._cpu_s = now_s, used_s
        return max(busy, 1.0) if is_missing and wants_processor(pids) else busy


class StallWatch:
    """Measures, as an async context, how long the event loop stands still.

    A process that gets no processor finds the answer and the deadline at the same time, and cannot
    tell which came first.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        """Begin to watch."""
        self._schedule()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, counting a tick that is late."""
        self._note()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        self._due_s = time.monotonic() + _TICK_S
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._note()
        self._schedule()

    def _note(self) -> None:
        self.worst_s = max(self.worst_s, time.monotonic() - self._due_s)
