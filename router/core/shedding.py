"""Waiting requests that need an adapter: under pressure, cold ones go before lower tiers do."""

from collections import deque

from router.core.adapters import AdapterResidency
from router.core.model import Request, State


class AdapterWaiters:
    """The waiting requests of a cell by adapter.

    Told of arrivals alone: what does not wait any more is passed over when it is met.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Request]] = {}  # by digest, by arrival

    def add(self, request: Request) -> None:
        """Note a request that begins to wait."""
        if not request.adapter:
            return
        waiting = self._waiting.setdefault(request.adapter, deque())
        _pass_over(waiting)
        waiting.append(request)

    def cheapest_cold(self, below_priority: int, residency: AdapterResidency) -> Request | None:
        """Return whom to shed of those whose adapter no replica has; None: nobody.

        The lowest tier goes first, then the latest arrival, seen among the latest of each adapter.
        """
        best: Request | None = None
        for digest in list(self._waiting):
            waiting = self._waiting[digest]
            _pass_over(waiting)
            if not waiting:
                del self._waiting[digest]
                continue
            last = waiting[-1]
            if last.priority >= below_priority or not residency.is_cold(digest):
                continue
            if best is None or (last.priority, -last.order) < (best.priority, -best.order):
                best = last
        return best


def _pass_over(waiting: deque[Request]) -> None:
    """Drop what has left the queue, at both ends."""
    while waiting and waiting[-1].state is not State.QUEUED:
        waiting.pop()
    while waiting and waiting[0].state is not State.QUEUED:
        waiting.popleft()
