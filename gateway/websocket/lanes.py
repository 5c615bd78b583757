"""The order of a socket's requests: one after the other in a stream, streams beside each other.

Pure.
"""

from collections import deque
from typing import Generic, TypeVar

from gateway.server.body import BodyBudget
from sluice.errors import ErrorCode, RejectedError

STREAMS_MAX = 64  # with requests, per socket
WAITING_MAX = 128  # requests of one socket that wait for the one before
WAITING_BYTES_MAX = 8 << 20

_Wanted = TypeVar("_Wanted")


class Lanes(Generic[_Wanted]):
    """The requests of one socket that have not ended."""

    def __init__(self, budget: BodyBudget) -> None:
        """Start empty; `budget` bounds the waiting bytes of all sockets of the worker."""
        self._budget = budget
        self._lanes: dict[str | None, deque[tuple[_Wanted, int]]] = {}
        self._waiting = self._bytes = 0

    @property
    def open(self) -> int:
        """Number of streams with requests."""
        return len(self._lanes)

    def add(self, stream_id: str | None, wanted: _Wanted, size: int) -> bool:
        """Take a request of this many bytes; return whether its stream begins with it.

        RejectedError: too many are under way, or wait.
        """
        lane = self._lanes.get(stream_id)
        if lane is None:
            if len(self._lanes) >= STREAMS_MAX:
                raise _overload(f"at most {STREAMS_MAX} streams have requests at once")
            self._lanes[stream_id] = deque()
            return True
        if self._waiting >= WAITING_MAX or self._bytes + size > WAITING_BYTES_MAX:
            raise _overload(f"at most {WAITING_MAX} requests, and 8 MiB of them, may wait")
        self._budget.take(size)
        lane.append((wanted, size))
        self._waiting += 1
        self._bytes += size
        return False

    def next(self, stream_id: str | None) -> _Wanted | None:
        """Return the request that follows one that has ended; None: the stream has no more."""
        lane = self._lanes[stream_id]
        if not lane:
            del self._lanes[stream_id]
            return None
        wanted, size = lane.popleft()
        self._waiting -= 1
        self._bytes -= size
        self._budget.release(size)
        return wanted

    def close(self) -> None:
        """Drop all requests."""
        self._budget.release(self._bytes)
        self._lanes.clear()
        self._waiting = self._bytes = 0


def _overload(bound: str) -> RejectedError:
    text = f"Too many requests over this socket: {bound}. Wait until some end."
    return RejectedError(ErrorCode.RATE_LIMIT_CONCURRENCY, text, retry_after_s=1.0)
