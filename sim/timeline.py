"""Virtual time of discrete-event runs, as a heap of planned actions."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timeline:
    """Runs actions at their times, and actions of the same time in the order of planning.

    Attributes:
        now: Time of the running action, in virtual seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Plan a call of `action(*args)` at a time that has not passed."""
        self._planned += 1
        heappush(self._events, (time_s, self._planned, action, args))

    def run(self, *, until_s: float = float("inf")) -> None:
        """Run planned actions until none is left, or the next action is later than `until_s`."""
        events = self._events
        while events and events[0][0] <= until_s:
            time_s, _, action, args = heappop(events)
            assert time_s >= self.now, "time never goes back"
            self.now = time_s
            action(*args)
