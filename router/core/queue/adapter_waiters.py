"""Records which waiting requests need an adapter.

Under overload, requests whose adapter no replica has loaded are shed before lower tiers.
"""

from collections.abc import Iterable

from router.core.fleet.adapters import AdapterResidency
from router.core.types.request import Request, RequestState

_SLACK = 64  # permitted stale entries, beyond the number of waiting requests


class AdapterWaiters:
    """The waiting requests of a cell, by adapter.

    The caller reports only arrivals. Entries of requests that have left the queue are skipped, and
    removed once these stale entries outnumber the waiting requests.
    """

    __slots__ = ("_noted", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, list[Request]] = {}  # by digest, in the order of arrival
        self._noted = 0  # upper bound of the number of entries

    def add(self, request: Request, waiting: int) -> None:
        """Add a queued request, where `waiting` is the number of all waiting requests."""
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
        """Return the request to shed among requests with an adapter that no replica has loaded.

        The candidates are the latest requests of each adapter. Among them, the lowest tier is shed
        first, and within a tier the latest arrival. The result is None if all candidates have at
        least `below_priority`.
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
    """Return the requests that are still queued."""
    return [request for request in requests if request.state is RequestState.QUEUED]
