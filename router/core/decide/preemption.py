"""Which running batch work is interrupted so that a waiting request of a higher tier is in time.

An interrupted request goes back into the queue with what it has emitted: it loses its places, not
its tokens, and most of its prompt is still cached when it comes back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.core.decide import forecast
from router.core.types.model import Request, Role, Slot, State

if TYPE_CHECKING:
    from router.core.cell import CellBook
    from router.core.fleet.replica import ReplicaBook

PREEMPTIONS_MAX = 3  # of one request; then it runs to its end
_CLAIM_S = 2.0  # an engine gives cancelled sequences up within some steps
_LOOK_AGAIN_S = 0.05  # after a walk that found nobody
_REPLICAS_MAX = 8  # looked at closely for one request, those that owe least


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence that occupies a replica, and that may be interrupted or has been.

    Attributes:
        blocks: KV blocks booked for it.
        progress_tokens: Computed so far, prompt and output: what may have to be computed again.
        owed_s: Of its prefill.
        is_ending: It was cancelled, and its room is free in a moment.
    """

    blocks: int
    progress_tokens: int
    owed_s: float
    is_ending: bool


@dataclass(frozen=True, slots=True)
class Room:
    """What a replica has, and what a request needs of it.

    Attributes:
        sequences_free: Places; without those of sequences that are ending.
        blocks_free: KV blocks; likewise.
        blocks_needed: By the request, with its expected output.
        backlog_s: Prefill owed.
        prefill_s: Of the request itself.
    """

    sequences_free: int
    blocks_free: int
    blocks_needed: int
    backlog_s: float
    prefill_s: float


def fits(room: Room, left_s: float) -> bool:
    """Return whether the first token comes within `left_s` if nobody is interrupted."""
    return (
        room.sequences_free > 0
        and room.blocks_free >= room.blocks_needed
        and room.backlog_s + room.prefill_s <= left_s
    )


def cheapest(room: Room, running: Sequence[Running], left_s: float) -> list[int] | None:
    """Return whom to interrupt, as indexes, so that the first token comes within `left_s`.

    The least progress is lost first, and nobody is interrupted in vain: without any one of them
    there would be too little room or too little time. None: not even all of them would help.
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


class Preemption:
    """What was interrupted in a cell, and for whom the room is that becomes free."""

    __slots__ = ("_claims", "_nobody_until")

    def __init__(self) -> None:
        self._claims: dict[int, _Claim] = {}  # by order of the request
        self._nobody_until = float("-inf")

    def victims(self, cell: "CellBook", request: Request, now: float) -> list[Slot]:
        """Return whom to interrupt for a waiting request; empty: nobody, or it would not help.

        Every request makes room for itself once, and what others have made is not counted as room.
        """
        if request.is_preemptible or now < self._nobody_until:
            return []
        self._forget_claims(now)
        if request.order in self._claims:
            return []
        due_s = min(request.arrived_at + request.objective_s, request.deadline_at) - now
        supply = cell.forecast.supply(cell, now)
        if forecast.queue_s(supply, 0, 0.0) + forecast.alone_s(cell, request) <= due_s:
            return []  # enough ends by itself
        found = self._cheapest_replica(cell, request, due_s, now)
        if found is None:
            self._nobody_until = now + _LOOK_AGAIN_S
            return []
        book, slots, blocks = found
        stopped = frozenset(slot.sequence for slot in slots)
        until = now + _CLAIM_S
        self._claims[request.order] = _Claim(request, book.replica_id, blocks, stopped, until)
        return slots

    def has_claim(self, request: Request) -> bool:
        """Return whether room is being made for a waiting request."""
        return request.order in self._claims

    def _forget_claims(self, now: float) -> None:
        gone = [
            order
            for order, claim in self._claims.items()
            if claim.until <= now or claim.request.state is not State.QUEUED
        ]
        for order in gone:
            del self._claims[order]

    def _cheapest_replica(
        self, cell: "CellBook", request: Request, due_s: float, now: float
    ) -> "tuple[ReplicaBook, list[Slot], int] | None":
        """Return where the least is lost; None: somewhere there is room in time, or nowhere."""
        stopped = frozenset[int]().union(*(claim.stopped for claim in self._claims.values()))
        places: list[tuple[float, int, ReplicaBook, Room]] = []
        for index, book in enumerate(_candidates(cell, request)):
            room = self._room(book, cell, request, now)
            if fits(room, due_s):
                return None
            if any(_may_stop(slot, request) for slot in book.slots.values()):
                places.append((room.backlog_s, index, book, room))
        places.sort()
        best: tuple[ReplicaBook, list[Slot], int] | None = None
        best_cost = (1 << 62, 0)
        for _, _, book, room in places[:_REPLICAS_MAX]:
            slots = [s for s in book.slots.values() if not s.is_open or _may_stop(s, request)]
            running = [_running(book, slot, stopped) for slot in slots]
            chosen = cheapest(room, running, due_s)
            if chosen is None:  # late it is already, but it need not wait any longer
                chosen = cheapest(room, running, request.deadline_at - now)
            if not chosen:
                continue
            cost = (sum(running[index].progress_tokens for index in chosen), len(chosen))
            if cost < best_cost:
                best_cost = cost
                best = book, [slots[index] for index in chosen], room.blocks_needed
        return best

    def _room(self, book: "ReplicaBook", cell: "CellBook", request: Request, now: float) -> Room:
        limits = book.limits
        assert limits is not None, "candidates are attached"
        claims = [c for c in self._claims.values() if c.replica_id == book.replica_id]
        uncached = request.uncached_tokens
        blocks = book.blocks(request.prompt_tokens + cell.output_expected(request))
        return Room(
            sequences_free=limits.sequences_max - len(book.slots) - len(claims),
            blocks_free=book.kv_free_blocks() - sum(claim.blocks for claim in claims),
            blocks_needed=min(blocks, limits.kv_blocks),  # one sequence alone always goes
            backlog_s=book.backlog_s(now),
            prefill_s=book.prefill_s(uncached, request.prompt_tokens - uncached),
        )


@dataclass(frozen=True, slots=True)
class _Claim:
    """Room on a replica that was made for a request, and that it has not taken yet."""

    request: Request
    replica_id: str
    blocks: int
    stopped: frozenset[int]  # sequences
    until: float


def _candidates(cell: "CellBook", request: Request) -> "list[ReplicaBook]":
    """Return the replicas that could serve a request if they had room."""
    return [
        book
        for book in cell.replicas_ready()
        if book.limits is not None
        and request.prompt_tokens <= book.limits.prompt_tokens_max
        and (book.limits.adapter_slots or not request.adapter)
        and book.role is not Role.PREFILL
        and not book.is_broken
        and cell.health.may_take(book.replica_id, len(book.slots))
    ]


def _may_stop(slot: Slot, request: Request) -> bool:
    owner = slot.request
    return (
        owner.is_preemptible
        and slot.is_open
        and owner.priority < request.priority
        and owner.preemptions < PREEMPTIONS_MAX
    )


def _running(book: "ReplicaBook", slot: Slot, stopped: frozenset[int]) -> Running:
    computed = slot.prompt_tokens - slot.cached_tokens - slot.prefill_owed
    return Running(
        blocks=slot.kv_blocks,
        progress_tokens=max(0, computed) + slot.emitted,
        owed_s=slot.prefill_owed / book.tokens_s,
        is_ending=not slot.is_open or slot.sequence in stopped,
    )
