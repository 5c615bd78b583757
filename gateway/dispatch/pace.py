"""Joins two steps of a stream in one write, but only while the event loop lags.

A write costs more CPU time than all other work for a token. While the event loop lags, a token
waits for at most one engine step, and is sent together with the next token of its stream. So the
writes and the lag fall by nearly half. Without lag, no token waits.
"""

import asyncio
from typing import Protocol

# Maximum wait of a token in seconds, which is the length of a busy engine's step.
_HELD_S_MAX = 0.02


class Holder(Protocol):
    """A stream that may delay a token by one step."""

    def release(self) -> None:
        """Write the delayed tokens, if there are any."""
        ...


class Lag(Protocol):
    """Measures whether the event loop runs its timers and callbacks in time."""

    @property
    def is_lagging(self) -> bool:
        """Whether timers or callbacks that are due still wait for the event loop."""
        ...


class AttemptPace:
    """Decides for one worker whether tokens wait for the next step.

    A stream reads `is_holding` to decide for a token. Router links report the steps.

    Attributes:
        is_holding: Whether a new token may wait for the next step.
    """

    __slots__ = ("_held", "_lag", "_timer", "is_holding")

    def __init__(self, lag: Lag) -> None:
        self._lag = lag
        self._held: list[Holder] = []
        self._timer: asyncio.TimerHandle | None = None
        self.is_holding = False

    def hold(self, holder: Holder) -> None:
        """Record that a stream delays a token."""
        self._held.append(holder)

    def begin_step(self) -> list[Holder]:
        """Measure the lag, and return the streams with a delayed token, for `end_step`."""
        before, self._held = self._held, []
        self.is_holding = self._lag.is_lagging
        return before

    def end_step(self, before: list[Holder]) -> None:
        """Write the tokens that were delayed before this step, unless the step has sent them."""
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
