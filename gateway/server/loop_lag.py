"""Tells when the event loop is late, and what held it up."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

INTERVAL_S = 0.02
# Later than this, so often in a row, and whoever can do with fewer wake-ups should. A loop that
# keeps up is on time now and then, however long its bursts are: a late timer is set again behind
# the burst that it met. Others that use the processor, a garbage collection or a large message make
# it late once or twice, and are no reason to hold tokens back: that doubles their gaps.
LAGGING_S = 0.002
LATE_IN_A_ROW = 5
BLOCKED_S = 0.25  # blocked for so long, what runs is written to the log
_WATCH_S = 0.1
_FRAMES_MAX = 12


class LoopLag:
    """Measures by how much a timer of the loop is late.

    Attributes:
        lag_s: At the last measurement.
        is_lagging: Whether the last five were more than 2 ms. A plain attribute: the hot path
            reads it.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        """Prepare; `observe` is told every measurement, in seconds."""
        self.lag_s = 0.0
        self.is_lagging = False
        self._late_in_a_row = 0
        self._observe = observe
        self._ticked_at_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        loop_thread = threading.get_ident()
        ended = threading.Event()
        self._ticked_at_s = time.monotonic()
        watcher = threading.Thread(
            target=self._watch, args=(loop_thread, ended), name="loop-watchdog", daemon=True
        )
        watcher.start()
        try:
            while True:
                due_s = time.monotonic() + INTERVAL_S
                await asyncio.sleep(INTERVAL_S)
                now_s = self._ticked_at_s = time.monotonic()
                self.note(max(0.0, now_s - due_s))
        finally:
            ended.set()

    def note(self, lag_s: float) -> None:
        """Take one measurement."""
        self._late_in_a_row = self._late_in_a_row + 1 if lag_s > LAGGING_S else 0
        self.is_lagging = self._late_in_a_row >= LATE_IN_A_ROW
        self.lag_s = lag_s
        self._observe(lag_s)

    def _watch(self, loop_thread: int, ended: threading.Event) -> None:
        """Run in a thread of its own: say once per blockage what the loop's thread does."""
        told_of_s = 0.0
        while not ended.wait(_WATCH_S):
            ticked_at_s = self._ticked_at_s
            blocked_s = time.monotonic() - ticked_at_s - INTERVAL_S
            if blocked_s < BLOCKED_S or ticked_at_s == told_of_s:
                continue
            told_of_s = ticked_at_s
            log.warning("loop_blocked", blocked_s=round(blocked_s, 3), where=_stack(loop_thread))


def _stack(thread: int) -> list[str]:
    """Return a thread's innermost calls, the outer first: places only, no values.

    No frame is kept: whatever request it belongs to would stay as long.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - documented
    places = traceback.extract_stack(frame)[-_FRAMES_MAX:] if frame is not None else []
    return [f"{place.filename}:{place.lineno} {place.name}" for place in places]
