"""Chooses, in turn, the waiting requests whose cached tokens are looked up again."""

from collections import deque
from collections.abc import Iterator

from router.core.queue.adapter_waiters import still_waiting
from router.core.types.request import Request

_PER_PASS = 4
_SLACK = 64  # entries of requests that do not wait any more, besides as many as do


class Repricing:
    """The waiting requests that may find something cached, the longest unseen first."""

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        self._turns: deque[Request] = deque()

    def add(self, request: Request, waiting: int) -> None:
        """Note a request that begins to wait; `waiting`: the number of all that do."""
        if not request.hashes:
            return
        self._turns.append(request)
        if len(self._turns) > 2 * waiting + _SLACK:
            self._turns = deque(still_waiting(self._turns))

    def due(self) -> Iterator[Request]:
        """Yield the few waiting requests whose turn it is in this pass."""
        for _ in range(min(_PER_PASS, len(self._turns))):
            request = self._turns.popleft()
            if request.dispatch is not None or request.is_done:
                continue  # one that comes back is looked at when it is next
            self._turns.append(request)
            yield request
