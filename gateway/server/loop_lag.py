"""Measures delays of the event loop, and logs the code that causes them."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

# Seconds between measurements. A measurement may wake a sleeping processor. The wake-up costs 0.2
# ms, which is more than the tokens of a few streams, so an idle loop is measured less often.
INTERVAL_S = 0.02
CALM_INTERVAL_S = 0.1
QUIET_INTERVAL_S = 0.25
CALM_SHARE = 0.25
QUIET_SHARE = 0.02
# The loop lags if it was this many seconds late twice in a row and was busy for half of that time.
# Streams then join tokens to save wake-ups. If other processes use the processor, joined tokens
# would save nothing, and would double the gaps between the tokens of a stream.
LAGGING_S = 0.002
BUSY_SHARE = 0.5
LATE_IN_A_ROW = 2
BLOCKED_S = 0.25  # seconds of blockage after which the running code's stack is logged
_WATCH_MIN_S = 0.05
_FRAMES_MAX = 12


class LoopLag:
    """Measures the delay of a timer of the loop.

    Attributes:
        lag_s: Seconds of lag at the last measurement.
        interval_s: Seconds until the next measurement.
        is_lagging: Whether the loop has more work than time. The flag is a plain attribute, since
            the hot path reads it.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        """`observe` is called with every measurement, in seconds."""
        self.lag_s = 0.0
        self.is_lagging = False
        self._late_in_a_row = 0
        self._observe = observe
        self._ticked_at_s = 0.0
        self.interval_s = INTERVAL_S

    async def run(self) -> None:
        """Measure the lag repeatedly until cancelled."""
        loop_thread = threading.get_ident()
        ended = threading.Event()
        self._ticked_at_s = time.monotonic()
        watcher = threading.Thread(
            target=self._watch, args=(loop_thread, ended), name="loop-watchdog", daemon=True
        )
        watcher.start()
        try:
            worked_s = time.thread_time()
            while True:
                began_s = time.monotonic()
                wanted_s = self.interval_s
                await asyncio.sleep(wanted_s)
                now_s = self._ticked_at_s = time.monotonic()
                before_s, worked_s = worked_s, time.thread_time()
                took_s = now_s - began_s
                self.note(max(0.0, took_s - wanted_s), (worked_s - before_s) / took_s)
        finally:
            ended.set()

    def note(self, lag_s: float, busy_share: float) -> None:
        """Record a measurement with the timer's delay and the loop thread's processor share."""
        is_late = lag_s > LAGGING_S and busy_share >= BUSY_SHARE
        self._late_in_a_row = self._late_in_a_row + 1 if is_late else 0
        self.is_lagging = self._late_in_a_row >= LATE_IN_A_ROW
        is_calm = lag_s <= LAGGING_S and busy_share < CALM_SHARE
        calm_s = QUIET_INTERVAL_S if busy_share < QUIET_SHARE else CALM_INTERVAL_S
        self.interval_s = calm_s if is_calm else INTERVAL_S
        self.lag_s = lag_s
        self._observe(lag_s)

    def _watch(self, loop_thread: int, ended: threading.Event) -> None:
        """Log the stack of the loop's thread once per blockage.

        The method runs in its own thread, which sleeps until the loop could be blocked for long
        enough.
        """
        told_of_s, wait_s = 0.0, _WATCH_MIN_S
        while not ended.wait(wait_s):
            due_s = self._ticked_at_s + self.interval_s + BLOCKED_S
            wait_s = max(_WATCH_MIN_S, due_s - time.monotonic())
            ticked_at_s = self._ticked_at_s
            blocked_s = time.monotonic() - ticked_at_s - self.interval_s
            if blocked_s < BLOCKED_S or ticked_at_s == told_of_s:
                continue
            told_of_s = ticked_at_s
            log.warning("loop_blocked", blocked_s=round(blocked_s, 3), where=_stack(loop_thread))


def _stack(thread: int) -> list[str]:
    """Return the source lines of a thread's innermost calls, the outermost call first.

    The result references no frame, since a frame would prevent a request's data from being freed.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - documented
    places = traceback.extract_stack(frame)[-_FRAMES_MAX:] if frame is not None else []
    return [f"{place.filename}:{place.lineno} {place.name}" for place in places]
