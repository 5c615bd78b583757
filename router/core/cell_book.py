"""One cell: its queue, its replicas, and the choice of a replica for the next request."""

from router.core.fair_queue import FairQueue
from router.core.model import CoreConfig, Request
from router.core.replica_book import ReplicaBook
from sluice.wire.router.v1 import router_pb2 as wire

_SMOOTHING = 0.05
_OUTPUT_MARGIN = 1.5  # what is booked, over the mean answer
_RETRY_AFTER_MIN_S = 0.1
_RETRY_AFTER_MAX_S = 30.0
_RETRY_AFTER_UNKNOWN_S = 2.0  # nothing is attached: about the time a replica takes to come back


class CellBook:
    """The state of one cell that this router owns (or owned, while its requests run)."""

    __slots__ = (
        "available",
        "cell_id",
        "is_dirty",
        "is_owned",
        "output_mean",
        "prompt_tokens_max",
        "queue",
        "replicas",
        "told",
    )

    def __init__(self, cell_id: str, config: CoreConfig) -> None:
        self.cell_id = cell_id
        self.is_owned = True
        self.queue = FairQueue()
        self.replicas: dict[str, ReplicaBook] = {}
        self.available: dict[str, ReplicaBook] = {}  # those that may be sent more
        self.output_mean = config.output_tokens_expected / _OUTPUT_MARGIN
        self.prompt_tokens_max: int | None = None  # of any replica; None: nothing is attached
        self.told = wire.CellState()
        self.is_dirty = True  # gateways have not heard of the latest change

    def update(self, book: ReplicaBook, config: CoreConfig, now: float) -> None:
        """Predict a replica anew after a change and file it under `available` or not."""
        self.is_dirty = True
        book.refresh(config, now)
        if book.is_available:
            self.available[book.replica_id] = book
        else:
            self.available.pop(book.replica_id, None)

    def output_expected(self, output_max: int) -> int:
        """Return how many output tokens to book for a request."""
        return min(output_max, max(1, int(self.output_mean * _OUTPUT_MARGIN)))

    def observe_output(self, tokens: int) -> None:
        """Learn from the length of an answer."""
        self.output_mean += _SMOOTHING * (tokens - self.output_mean)

    def pick(self, request: Request) -> ReplicaBook | None:
        """Return the replica that would be done soonest with all it owes and this request.

        None when no replica can start on it soon: then it waits here. A replica where it failed
        before is taken only when there is no other.
        """
        output = self.output_expected(request.output_max)
        best: ReplicaBook | None = None
        best_s = float("inf")
        prompt = request.prompt_tokens
        for book in self.available.values():
            score_s = book.load_s + prompt * book.token_s
            if score_s < best_s and book.fits(prompt, output):
                if book.replica_id == request.avoid and len(self.replicas_ready()) > 1:
                    continue
                best, best_s = book, score_s
        return best

    def replicas_ready(self) -> list[ReplicaBook]:
        """Return the replicas that are attached and not draining."""
        return [
            book
            for book in self.replicas.values()
            if book.limits is not None and not book.is_draining
        ]

    def relimit(self) -> None:
        """Find the longest prompt anew after a replica was attached or lost."""
        limits = [book.limits for book in self.replicas.values() if book.limits is not None]
        longest = (entry.prompt_tokens_max for entry in limits)
        self.prompt_tokens_max = max(longest, default=None)

    def retry_after_s(self) -> float:
        """Return the predicted time until half of the queue is served."""
        ready = self.replicas_ready()
        if not ready:
            return _RETRY_AFTER_UNKNOWN_S
        token_s = sum(book.token_s for book in ready) / len(ready)
        decode_s = sum(book.speed.decode_token_s for book in ready) / len(ready)
        waiting_s = self.queue.tokens * token_s
        waiting_s += self.queue.requests * self.output_mean * decode_s
        running_s = sum(book.load_s for book in ready)
        wait_s = (waiting_s / 2 + running_s) / len(ready)
        return min(max(wait_s, _RETRY_AFTER_MIN_S), _RETRY_AFTER_MAX_S)

    def state(self) -> wire.CellState:
        """Return what gateways are told about the cell."""
        output = int(self.output_mean)
        owed = sum(book.owed_tokens() for book in self.replicas.values())
        return wire.CellState(
            cell_id=self.cell_id,
            queued=self.queue.requests,
            running=sum(len(book.slots) for book in self.replicas.values()),
            replicas_ready=len(self.replicas_ready()),
            tokens_owed=owed + self.queue.tokens + output * self.queue.requests,
        )
