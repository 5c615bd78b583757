"""Orders the requests of a socket, so that each stream runs one request at a time. Pure."""

from collections import deque
from typing import Generic, TypeVar

from gateway.server.body import BodyBudget
from sluice.errors import ErrorCode, RejectedError

STREAMS_MAX = 64  # maximum number of concurrent streams per socket
WAITING_MAX = 128  # maximum number of queued requests per socket
WAITING_BYTES_MAX = 8 << 20

_Wanted = TypeVar("_Wanted")


class Lanes(Generic[_Wanted]):
    """The running and queued requests of one socket."""

    def __init__(self, budget: BodyBudget) -> None:
        """The `budget` bounds the queued bytes of all sockets of the worker."""
        self._budget = budget
        self._lanes: dict[str | None, deque[tuple[_Wanted, int]]] = {}
        self._waiting = self._bytes = 0

    @property
    def open(self) -> int:
        """Number of streams with running requests."""
        return len(self._lanes)

    def add(self, stream_id: str | None, wanted: _Wanted, size: int) -> bool:
        """Add a request to its stream.

        Args:
            stream_id: Name of the stream, or None for the unnamed stream.
            wanted: The request.
            size: Bytes of the request.

        Returns:
            True if the request can start now. False if it was queued behind earlier requests of its
            stream.

        Raises:
            RejectedError: The socket has too many streams or too many queued requests.
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
        """Return the next request of a stream after one has ended, or None if none is queued."""
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
