"""Offers another pool to requests that wait in a router's queue while the other pool is free.

A pool of the model may have been empty or asleep when a request was sent elsewhere. Once it can
start requests at once, the oldest requests of the highest tier are offered to it first. Each look
at a free pool offers twice as many as the look before, because all workers of all gateways do so.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from gateway.dispatch.cell_choice import CellView
from gateway.pool_choice import PoolReason, ServingPool, better_pool

# Seconds between two looks, a little less than between two reports of a router about its cells.
LOOK_S = 0.08
# Seconds for which a request waits at a router before it may move. A placement is told sooner.
WAITED_S = 0.2
OFFERS_MAX = 16  # most requests of a worker that move to one pool at one look


class WaitingRequest(Protocol):
    """A request that has been submitted to a router."""

    @property
    def is_queued(self) -> bool:
        """Whether the request waits for its first placement."""
        ...

    @property
    def cell_id(self) -> str:
        """Id of the cell in which the request waits."""
        ...

    @property
    def pool_id(self) -> str:
        """Id of the pool in which the request waits."""
        ...

    @property
    def priority(self) -> int:
        """Priority of the request's tier."""
        ...

    @property
    def session(self) -> int:
        """Hash of the request's session, or 0 without a session."""
        ...

    def offer(self, pool_id: str) -> None:
        """Move the request to another pool, unless a replica begins it before."""
        ...


Waiting = dict[WaitingRequest, float]  # requests with the time since when they wait


class PoolMoves:
    """The requests of a worker that wait and may move to another pool of their model."""

    def __init__(
        self,
        views: Callable[[str], Sequence[CellView]],
        count: Callable[[str, PoolReason], None],
    ) -> None:
        """Watch no request yet.

        Args:
            views: Returns the views of a pool's cells.
            count: Counts a move by its new pool.
        """
        self._views = views
        self._count = count
        self._waiting: dict[tuple[ServingPool, ...], Waiting] = {}
        self._offered: Counter[str] = Counter()  # requests offered at the last look, by pool
        self._looked_at_s = 0.0

    def add(self, pools: tuple[ServingPool, ...], request: WaitingRequest, now_s: float) -> None:
        """Watch a request that waits at a router, until `discard`."""
        self._waiting.setdefault(pools, {})[request] = now_s

    def discard(self, pools: tuple[ServingPool, ...], request: WaitingRequest) -> None:
        """Watch a request no longer."""
        waiting = self._waiting.get(pools)
        if waiting is not None:
            waiting.pop(request, None)
            if not waiting:
                del self._waiting[pools]

    def look(self, now_s: float) -> None:
        """Offer free pools to waiting requests. Routers have reported on their cells before."""
        if not self._waiting or now_s < self._looked_at_s + LOOK_S:
            return
        self._looked_at_s = now_s
        before, self._offered = self._offered, Counter()
        for pools, waiting in tuple(self._waiting.items()):
            views = {pool.pool_id: self._views(pool.pool_id) for pool in pools}
            free = [number for number, it in enumerate(pools) if _is_free(views[it.pool_id])]
            if free:
                self._offer(pools, waiting, views, free, before, now_s)

    def _offer(
        self,
        pools: Sequence[ServingPool],
        waiting: Waiting,
        views: dict[str, Sequence[CellView]],
        free: Sequence[int],
        before: Counter[str],
        now_s: float,
    ) -> None:
        left = {
            number: min(OFFERS_MAX, max(1, 2 * before[pools[number].pool_id])) for number in free
        }
        waits_ms = {number: _wait_ms(views[pools[number].pool_id]) for number in free}
        numbers = {pool.pool_id: number for number, pool in enumerate(pools)}
        cells_ms = {it.cell_id: _wait_ms([it]) for of in views.values() for it in of}
        for request, waited_ms in _oldest_first(waiting, now_s):
            own = numbers[request.pool_id]
            found = {it: wait_ms for it, wait_ms in waits_ms.items() if left[it] and it != own}
            if not any(left.values()):
                return
            here_ms = cells_ms.get(request.cell_id)
            if here_ms is not None:
                # A prediction counts prompt tokens. The request may wait for a free sequence.
                here_ms = max(here_ms, waited_ms)
            number = better_pool(pools, found, own, here_ms, request.session)
            if number is not None:
                left[number] -= 1
                pool_id = pools[number].pool_id
                self._offered[pool_id] += 1
                self._count(pool_id, PoolReason.MOVE)
                request.offer(pool_id)


def _oldest_first(waiting: Waiting, now_s: float) -> Iterable[tuple[WaitingRequest, float]]:
    """Return the requests that may move with their waits in ms, by descending tier and arrival."""
    found = [
        (-request.priority, since_s, number, request)
        for number, (request, since_s) in enumerate(waiting.items())
        if request.is_queued and now_s - since_s >= WAITED_S
    ]
    return [(request, 1000 * (now_s - since_s)) for _, since_s, _, request in sorted(found)]


def _is_free(views: Sequence[CellView]) -> bool:
    """Return whether a pool has replicas and no queue."""
    serving = [it for it in views if it.replicas_ready and not (it.is_refusing or it.is_draining)]
    return bool(serving) and not any(it.queued for it in serving)


def _wait_ms(views: Sequence[CellView]) -> float | None:
    """Return the least predicted wait of cells, or None if no replica serves."""
    return min(
        [it.wait_ms for it in views if it.replicas_ready and not it.is_refusing], default=None
    )
