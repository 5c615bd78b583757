"""Decides which running batch work is preempted for a waiting request of a higher tier.

A preempted request returns to the queue with its emitted tokens, so no output is lost. When it is
dispatched again, most of its prompt is still cached.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.core.types.request import Request, RequestState

PREEMPTIONS_MAX = 3  # preemptions per request, after which the request runs to its end
_CLAIM_S = 2.0  # seconds until a claim expires, long enough for engines to end cancelled sequences
_REPLICAS_MAX = 8  # most replicas examined per request, the least owed prefill first


@dataclass(frozen=True, slots=True)
class RunningSequence:
    """A sequence on a replica that may be preempted or is already ending.

    Attributes:
        blocks: KV blocks reserved for the sequence.
        progress_tokens: Computed tokens, prompt and output, that may have to be computed again.
        owed_s: Remaining seconds of the sequence's prefill.
        is_ending: Whether the sequence was cancelled, so that its slot and blocks are free soon.
    """

    blocks: int
    progress_tokens: int
    owed_s: float
    is_ending: bool


@dataclass(frozen=True, slots=True)
class PreemptionRoom:
    """The free capacity of a replica, and the needs of a request on that replica.

    Attributes:
        sequences_free: Free batch slots, not counting the slots of ending sequences.
        blocks_free: Free KV blocks, not counting the blocks of ending sequences.
        blocks_needed: KV blocks of the request with its expected output.
        backlog_s: Seconds of owed prefill.
        prefill_s: Seconds of the request's own prefill.
    """

    sequences_free: int
    blocks_free: int
    blocks_needed: int
    backlog_s: float
    prefill_s: float


def fits(room: PreemptionRoom, left_s: float) -> bool:
    """Return whether a request's first token is predicted within `left_s` without a preemption."""
    return (
        room.sequences_free > 0
        and room.blocks_free >= room.blocks_needed
        and room.backlog_s + room.prefill_s <= left_s
    )


def cheapest(
    room: PreemptionRoom, running: Sequence[RunningSequence], left_s: float
) -> list[int] | None:
    """Return the sequences to preempt so that the first token is predicted within `left_s`.

    The result has indices of `running`. Sequences with the least progress are chosen first. Each
    chosen preemption is necessary, because without it the capacity or the time would not suffice.
    The result is None if preempting all sequences would not suffice.
    """
    sequences = room.sequences_free + sum(entry.is_ending for entry in running)
    blocks = room.blocks_free + sum(entry.blocks for entry in running if entry.is_ending)
    ending_s = sum(entry.owed_s for entry in running if entry.is_ending)
    late_s = max(0.0, room.backlog_s - ending_s) + room.prefill_s - left_s
    order = sorted(
        (index for index, entry in enumerate(running) if not entry.is_ending),
        key=lambda index: (running[index].progress_tokens, -index),
    )
    chosen: list[int] = []
    for index in order:
        if sequences > 0 and blocks >= room.blocks_needed and late_s <= 0.0:
            break
        chosen.append(index)
        sequences += 1
        blocks += running[index].blocks
        late_s -= running[index].owed_s
    if sequences <= 0 or blocks < room.blocks_needed or late_s > 0.0:
        return None
    for index in reversed(chosen.copy()):
        entry = running[index]
        is_spare = (
            sequences > 1
            and blocks - entry.blocks >= room.blocks_needed
            and late_s + entry.owed_s <= 0.0
        )
        if is_spare:
            chosen.remove(index)
            sequences -= 1
            blocks -= entry.blocks
            late_s += entry.owed_s
    return chosen


@dataclass(frozen=True, slots=True)
class RoomClaim:
    """Capacity that preemptions free on a replica for a request that is still queued.

    Attributes:
        blocks: KV blocks that the request needs.
        stopped: Preempted sequences.
        until: Time at which the claim expires.
    """

    request: Request
    replica_id: str
    blocks: int
    stopped: frozenset[int]
    until: float


class RoomClaims:
    """The claims of a cell's waiting requests on preempted capacity, at most one per request."""

    __slots__ = ("_claims",)

    def __init__(self) -> None:
        self._claims: dict[int, RoomClaim] = {}  # claims by `Request.order`

    def has(self, request: Request) -> bool:
        """Return whether a waiting request has a claim."""
        return request.order in self._claims

    def add(
        self, request: Request, replica_id: str, blocks: int, stopped: Iterable[int], now: float
    ) -> None:
        """Record that sequences were preempted for a request."""
        until = now + _CLAIM_S
        self._claims[request.order] = RoomClaim(
            request, replica_id, blocks, frozenset(stopped), until
        )

    def forget_ended(self, now: float) -> None:
        """Drop claims that have expired, and claims of requests that left the queue."""
        gone = [
            order
            for order, claim in self._claims.items()
            if claim.until <= now or claim.request.state is not RequestState.QUEUED
        ]
        for order in gone:
            del self._claims[order]

    def of(self, replica_id: str) -> list[RoomClaim]:
        """Return the claims on one replica."""
        return [claim for claim in self._claims.values() if claim.replica_id == replica_id]

    def stopped(self) -> frozenset[int]:
        """Return all preempted sequences."""
        return frozenset[int]().union(*(claim.stopped for claim in self._claims.values()))


def cheapest_replica(
    rooms: Sequence[PreemptionRoom | None],
    running: Callable[[int], Sequence[RunningSequence]],
    *,
    due_s: float,
    deadline_s: float,
) -> tuple[int, list[int]] | None:
    """Return the replica where the least progress is lost, and the sequences to preempt there.

    Args:
        rooms: Free capacity of each replica, or None for a replica without preemptible sequences.
        running: Returns the sequences of a replica, and is called for a few replicas only.
        due_s: Seconds until the request misses its TTFT objective.
        deadline_s: Seconds until the request's deadline, used where the objective cannot be met.
    """
    places = sorted((room.backlog_s, index) for index, room in enumerate(rooms) if room is not None)
    best: tuple[int, list[int]] | None = None
    best_cost = (1 << 62, 0)
    for _, index in places[:_REPLICAS_MAX]:
        room = rooms[index]
        assert room is not None, "places have room"
        sequences = running(index)
        chosen = cheapest(room, sequences, due_s)
        if chosen is None:  # the objective is out of reach, so the deadline is tried
            chosen = cheapest(room, sequences, deadline_s)
        if not chosen:
            continue
        cost = (sum(sequences[one].progress_tokens for one in chosen), len(chosen))
        if cost < best_cost:
            best_cost = cost
            best = index, chosen
    return best
