"""Heads that do not come in time: one timer for any number of connections."""

import asyncio
from typing import Protocol

_BATCH = 64  # connections that are ended in one go: about a millisecond of work


class AwaitsHead(Protocol):
    """A connection whose next request head is awaited."""

    def head_timed_out(self) -> None:
        """End the connection, if it still waits."""


class HeadDeadlines:
    """Ends connections whose request head is not complete in time.

    All have the same time, so that the oldest is always the first to end: a dict in the order of
    insertion is the whole queue, and begin and end cost a dict operation each.
    """

    def __init__(self, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare; the timer runs while something waits."""
        self._timeout_s = timeout_s
        self._loop = loop
        self._due_s: dict[AwaitsHead, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def begin(self, connection: AwaitsHead) -> None:
        """A head is awaited from now on, if it was not already."""
        if connection not in self._due_s:
            due_s = self._due_s[connection] = self._loop.time() + self._timeout_s
            if self._timer is None:
                self._timer = self._loop.call_at(due_s, self._expire)

    def end(self, connection: AwaitsHead) -> None:
        """The head is complete, or the connection has ended."""
        self._due_s.pop(connection, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for _ in range(_BATCH):
            if not self._due_s:
                return
            connection, due_s = next(iter(self._due_s.items()))
            if due_s > now_s:
                self._timer = self._loop.call_at(due_s, self._expire)
                return
            del self._due_s[connection]
            connection.head_timed_out()
        self._timer = self._loop.call_later(0, self._expire)
