"""Measures the cause of a late probe, which may be a frozen engine or a lack of processor time."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from sluice.procfs import cpu_s, wants_processor

_TICK_S = 0.05
_LOOK_SHARE = 0.75  # share of the probe's deadline after which the engine's work is measured
_WINDOW_MIN_S = 0.01  # shortest measured time, equal to the kernel's resolution of processor time


class Activity:
    """The processor time that an engine's processes used since the last call of `look`."""

    def __init__(self) -> None:
        self._looked_at_s = time.monotonic()
        self._cpu_s = 0.0

    def look(self, pids: Sequence[int]) -> float:
        """Return the mean number of processors that these processes used since the last call."""
        now_s, used_s = time.monotonic(), cpu_s(pids)
        window_s = max(_WINDOW_MIN_S, now_s - self._looked_at_s)
        busy = max(0.0, used_s - self._cpu_s) / window_s
        self._looked_at_s, self._cpu_s = now_s, used_s
        return busy


class ProbeWatch:
    """Watches agent and engine, as an async context, while a probe waits for its answer.

    An agent without processor time handles answer and deadline at the same time, and cannot
    determine which came first. So `stalled_s` reports how long its event loop was blocked. An
    engine without processor time also answers late. `wants_processor` distinguishes such an engine
    from a frozen one. The engine's work is measured well before the deadline. The reason is that
    the end of a probe causes some work even in the server of a frozen engine.
    """

    def __init__(self, pids: Sequence[int], timeout_s: float) -> None:
        """Schedule the measurements during a probe whose deadline is `timeout_s` seconds away."""
        self.stalled_s = 0.0
        self._pids = pids
        self._wants_processor: bool | None = None
        self._loop = asyncio.get_running_loop()
        self._look = self._loop.call_later(_LOOK_SHARE * timeout_s, self._look_now)
        self._due_s = 0.0
        self._tick: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        """Start to measure the delays of the event loop."""
        self._schedule()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the measurements, and include the delay of the current interval."""
        self._note_tick()
        self._look.cancel()
        if self._tick is not None:
            self._tick.cancel()

    def wants_processor(self) -> bool:
        """Return whether the engine was working, or was waiting for a processor or a disk."""
        if self._wants_processor is None:  # the probe ended before the measurement
            self._look_now()
        return bool(self._wants_processor)

    def _look_now(self) -> None:
        self._wants_processor = wants_processor(self._pids)

    def _schedule(self) -> None:
        self._due_s = time.monotonic() + _TICK_S
        self._tick = self._loop.call_later(_TICK_S, self._ticked)

    def _ticked(self) -> None:
        self._note_tick()
        self._schedule()

    def _note_tick(self) -> None:
        self.stalled_s = max(self.stalled_s, time.monotonic() - self._due_s)
