"""Waiting requests that need an adapter: under pressure, cold ones are shed before lower tiers."""

from collections.abc import Iterable

from router.core.fleet.adapters import AdapterResidency
from router.core.types.request import Request, RequestState

_SLACK = 64  # of those that do not wait any more, besides as many as do


class AdapterWaiters:
    """The waiting requests of a cell by adapter.

    Only arrivals are reported: requests that do not wait any more are skipped, and dropped once
    they outnumber the waiting ones.
    """

    __slots__ = ("_noted", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, list[Request]] = {}  # by digest, by arrival
        self._noted = 0  # at least as many as there are

    def add(self, request: Request, waiting: int) -> None:
        """Note a request that begins to wait; `waiting` is the number of all waiting ones."""
        if not request.adapter:
            return
        self._waiting.setdefault(request.adapter, []).append(request)
        self._noted += 1
        if self._noted > 2 * waiting + _SLACK:
            self._sweep()

    def _sweep(self) -> None:
        left = {digest: still_waiting(those) for digest, those in self._waiting.items()}
        self._waiting = {digest: those for digest, those in left.items() if those}
        self._noted = sum(map(len, self._waiting.values()))

    def cheapest_cold(self, below_priority: int, residency: AdapterResidency) -> Request | None:
        """Return the request to shed among those whose adapter no replica has; None: there is none.

        The lowest tier goes first, then the latest arrival, among the latest of each adapter.
        """
        best: Request | None = None
        for digest in list(self._waiting):
            waiting = self._waiting[digest]
            while waiting and waiting[-1].state is not RequestState.QUEUED:
                waiting.pop()
            if not waiting:
                del self._waiting[digest]
                continue
            last = waiting[-1]
            if last.priority >= below_priority or not residency.is_cold(digest):
                continue
            if best is None or (last.priority, -last.order) < (best.priority, -best.order):
                best = last
        return best


def still_waiting(requests: Iterable[Request]) -> list[Request]:
    """Return the waiting ones of some requests."""
    return [request for request in requests if request.state is RequestState.QUEUED]
