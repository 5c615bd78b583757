"""Responses in this worker's memory only, which later requests of the same socket may continue.

The latest responses are remembered while the socket is open. If a request that continues a response
fails, that response is dropped, so that the client restarts with its whole history.
"""

from collections.abc import Sequence

from gateway.bodies.response_items import InputItem
from gateway.responses.events import ResponseEvents
from gateway.responses.keeping import Keeping
from gateway.responses.store import ResponseStore
from gateway.server.body import BodyBudget
from sluice.errors import ErrorCode, PlatformError, RejectedError
from sluice.wire.state.v1 import state_pb2 as wire

TURNS_MAX = 1024  # maximum number of responses of one socket
BYTES_MAX = 16 << 20  # maximum bytes of all responses of one socket
WORKER_BYTES_MAX = 512 << 20


class LocalTurns:
    """The responses that one socket may continue."""

    def __init__(self, budget: BodyBudget) -> None:
        """The `budget` bounds the bytes of all sockets of the worker."""
        self._budget = budget
        self._turns: dict[str, wire.StoredResponse] = {}  # oldest first
        self._under_way: set[str] = set()
        self._bytes = 0

    def begin(self, response_id: str) -> None:
        """Record that a response is under way."""
        self._under_way.add(response_id)

    def end(self, response_id: str) -> None:
        """Record that a response is no longer under way."""
        self._under_way.discard(response_id)

    def find(self, response_id: str, param: str) -> wire.StoredResponse | None:
        """Return a response, or None if it is not remembered, or raise CONFLICT while it runs."""
        if response_id in self._under_way:
            text = f"Response '{response_id}' is still under way: continue it when it has ended."
            raise PlatformError(ErrorCode.CONFLICT, text, param=param)
        return self._turns.get(response_id)

    def add(self, turn: wire.StoredResponse) -> None:
        """Add an ended response.

        Older responses are dropped to free memory for the new response. A response too large for
        the budget is not added.
        """
        size = turn.ByteSize()
        while self._turns and (len(self._turns) >= TURNS_MAX or self._bytes + size > BYTES_MAX):
            self.forget(next(iter(self._turns)))
        if size > BYTES_MAX:
            return
        try:
            self._budget.take(size)
        except RejectedError:
            return
        self._bytes += size
        self._turns[turn.id] = turn

    def forget(self, response_id: str) -> None:
        """Drop a response if it is remembered here."""
        turn = self._turns.pop(response_id, None)
        if turn is not None:
            self._bytes -= turn.ByteSize()
            self._budget.release(turn.ByteSize())

    def close(self) -> None:
        """Drop all responses."""
        for response_id in list(self._turns):
            self.forget(response_id)


class LocalKeeping(Keeping):
    """The record of a response in memory only. Only the response's socket may continue it."""

    __slots__ = ("_continued", "_turns")

    is_storing = False

    def __init__(
        self,
        store: ResponseStore,
        response_id: str,
        tenant_id: str,
        *,
        items: Sequence[InputItem],
        ancestors: Sequence[str],
        turns: LocalTurns,
    ) -> None:
        """The `turns` are the responses of the request's socket."""
        super().__init__(store, response_id, tenant_id, items=items, ancestors=ancestors)
        self._turns = turns
        self._continued = ancestors[-1] if ancestors else ""

    def begin(self, events: ResponseEvents) -> None:
        """Record the id for the response's own socket only."""
        del events
        self._turns.begin(self._turn.id)

    def note_failure(self, response: bytes) -> None:
        """Drop the response that the failed response continued."""
        del response
        self._turns.forget(self._continued)

    async def keep(self, response: bytes, deltas: bytes = b"") -> bool:
        """Add the response to this socket's memory."""
        del deltas  # no request can read the response's stream
        self._turn.response = response
        self._turns.add(self._turn)
        return False

    def end(self) -> None:
        """Record that the response is no longer under way."""
        self._turns.end(self._turn.id)
