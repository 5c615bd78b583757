"""Reasoning and arguments of calls, gathered for a moment: clients only add them up.

Half an argument is of no use to a reader, and an event for each token costs a write.
"""

import asyncio
from collections.abc import Callable

from gateway.dialects.delta import NOTHING, AnswerDelta, CallDelta

# Beyond it the pause is not waited for: an engine may bring much at once.
_CHARACTERS_MAX = 16 << 10


class DeltaGatherer:
    """Keeps pieces of reasoning and of calls until the pause since the last event is over."""

    __slots__ = ("_characters", "_is_over", "_kept", "_pause_s", "_timer")

    def __init__(self, pause_s: float, is_over: Callable[[], None]) -> None:
        """Prepare; the first piece passes at once.

        Args:
            pause_s: Seconds between two events with such pieces.
            is_over: Called when the pause is over and pieces are kept; `take` is to be called then.
        """
        self._pause_s = pause_s
        self._is_over = is_over
        self._kept = NOTHING
        self._characters = 0
        self._timer: asyncio.TimerHandle | None = None

    def passed(self, delta: AnswerDelta) -> list[AnswerDelta]:
        """Return what is to be shown now, in this order."""
        both = together(self._kept, delta)
        if both is None:  # content does not wait, nor does what stands before it
            return [it for it in (self.take(), delta) if it is not NOTHING]
        if self._timer is None:
            self._start_timer()
            return [both]
        self._kept = both
        self._characters += len(delta.reasoning) + sum([len(it.arguments) for it in delta.calls])
        return [self.take()] if self._characters > _CHARACTERS_MAX else []

    def take(self) -> AnswerDelta:
        """Return what is kept, perhaps nothing."""
        kept, self._kept = self._kept, NOTHING
        self._characters = 0
        return kept

    def close(self) -> AnswerDelta:
        """Return what is kept; nothing is kept any more."""
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
    """Return one delta without content that says what two say; None: there is none. Pure."""
    if first.content or second.content or (first.calls and second.reasoning):
        return None
    return AnswerDelta("", first.reasoning + second.reasoning, _joined(first.calls, second.calls))


def _joined(first: tuple[CallDelta, ...], second: tuple[CallDelta, ...]) -> tuple[CallDelta, ...]:
    """Return pieces of calls, with those of one call that stand side by side as one."""
    if not first or not second:
        return first or second
    *before, last = first
    following, *rest = second
    if following.name or following.index != last.index:
        return first + second
    grown = last._replace(arguments=last.arguments + following.arguments)
    return (*before, grown, *rest)
