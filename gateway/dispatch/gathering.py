"""Gathers a stream's reasoning and tool-call arguments, so that several tokens share one event.

A client cannot use half an argument, and a separate event for each token would cost a write.
"""

import asyncio
from collections.abc import Callable

from gateway.dialects.delta import NOTHING, AnswerDelta, CallDelta

# Gathered characters above which the pieces are sent before the pause is over.
_CHARACTERS_MAX = 16 << 10


class DeltaGatherer:
    """Collects pieces of reasoning and of calls until the pause since the last event is over."""

    __slots__ = ("_characters", "_is_over", "_kept", "_pause_s", "_timer")

    def __init__(self, pause_s: float, is_over: Callable[[], None]) -> None:
        """Send the first piece without delay.

        Args:
            pause_s: Seconds between two events with reasoning or calls.
            is_over: Called if pieces wait at the end of a pause. The function must call `take`.
        """
        self._pause_s = pause_s
        self._is_over = is_over
        self._kept = NOTHING
        self._characters = 0
        self._timer: asyncio.TimerHandle | None = None

    def passed(self, delta: AnswerDelta) -> list[AnswerDelta]:
        """Add a piece, and return the pieces to send now, in this order."""
        both = together(self._kept, delta)
        # None means that `delta` has content, which is sent at once after the collected pieces.
        if both is None:
            return [it for it in (self.take(), delta) if it is not NOTHING]
        if self._timer is None:
            self._start_timer()
            return [both]
        self._kept = both
        self._characters += len(delta.reasoning) + sum([len(it.arguments) for it in delta.calls])
        return [self.take()] if self._characters > _CHARACTERS_MAX else []

    def take(self) -> AnswerDelta:
        """Remove and return the collected pieces, or `NOTHING`."""
        kept, self._kept = self._kept, NOTHING
        self._characters = 0
        return kept

    def close(self) -> AnswerDelta:
        """Stop collecting, and return the collected pieces."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self.take()

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._end_pause)

    def _end_pause(self) -> None:
        self._timer = None
        if self._kept is not NOTHING:
            self._start_timer()
            self._is_over()


def together(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta | None:
    """Merge two consecutive deltas, or return None if content or their order forbids it. Pure."""
    if first.content or second.content or (first.calls and second.reasoning):
        return None
    return AnswerDelta("", first.reasoning + second.reasoning, _joined(first.calls, second.calls))


def _joined(first: tuple[CallDelta, ...], second: tuple[CallDelta, ...]) -> tuple[CallDelta, ...]:
    """Return the pieces of two deltas, with adjacent pieces of the same call merged."""
    if not first or not second:
        return first or second
    *before, last = first
    following, *rest = second
    if following.name or following.index != last.index:
        return first + second
    grown = last._replace(arguments=last.arguments + following.arguments)
    return (*before, grown, *rest)
