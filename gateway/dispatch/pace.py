"""Joins two steps of a stream in one write, but only while this worker cannot keep up.

A write costs more than all other work for a token. While the event loop lags, every stream's next
token waits for the one behind it, at most one step long, and both leave in one write. The work
falls by nearly half, and the lag with it. Without a lag no token waits.
"""

import asyncio
from typing import Protocol

# A step of a busy engine; a token that no step has joined by then leaves alone.
_HELD_S_MAX = 0.02


class Holder(Protocol):
    """A stream that may keep a token for one step."""

    def release(self) -> None:
        """Write the kept tokens, if there are any."""
        ...


class Lag(Protocol):
    """Measures whether the event loop keeps up."""

    @property
    def is_lagging(self) -> bool:
        """Whether due work waits for the processor."""
        ...


class AttemptPace:
    """The pace of one worker; streams query it, router links report the ends of steps.

    Attributes:
        is_holding: Whether a new token may wait for the next step.
    """

    __slots__ = ("_held", "_lag", "_timer", "is_holding")

    def __init__(self, lag: Lag) -> None:
        """Prepare."""
        self._lag = lag
        self._held: list[Holder] = []
        self._timer: asyncio.TimerHandle | None = None
        self.is_holding = False

    def hold(self, holder: Holder) -> None:
        """Note that a stream keeps a token."""
        self._held.append(holder)

    def begin_step(self) -> list[Holder]:
        """Look at the clock; return the streams that kept a token, for `end_step`."""
        before, self._held = self._held, []
        self.is_holding = self._lag.is_lagging
        return before

    def end_step(self, before: list[Holder]) -> None:
        """Release the streams that got no token in this step."""
        for holder in before:
            holder.release()
        if self._held and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_HELD_S_MAX, self._release_late, self._held)

    def _release_late(self, held: list[Holder]) -> None:
        self._timer = None
        if held is self._held:
            self._held = []
            for holder in held:
                holder.release()
        elif self._held:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_HELD_S_MAX, self._release_late, self._held)
