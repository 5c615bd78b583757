"""Prompts on one replica, answers on another: when that pays, and the life of a request that does.

Optional: only cells with prefill replicas do it, and each request decides anew. A split request
runs on a prefill replica for its first token, which is the answer's first token as well; then the
KV blocks of its prompt are copied to a replica that decodes, and it goes on there. Whatever fails
on the way costs time and never the answer: the decode side computes the prompt again.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.core.decide import placement
from router.core.decide.placement import Choice
from router.core.types.model import Request, Slot, Transfer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.core.cell import CellBook
    from router.core.fleet.replica import ReplicaBook

FEATURE = "kv_transfer"  # of an engine that hands blocks out and takes them in
# A second of prefill takes so much from each sequence that decodes there, in seconds of waiting
# for a first token: it delays them all, and each of them a little.
_INTERFERENCE = 0.01
# So many of those that wait count: enough to keep no prefill replica idle beside a queue.
_WAITING_MAX = 8
# Priors: 320 KB of cache per token (a 70-billion-parameter base) over 100-gigabit Ethernet.
_TOKEN_S = 32e-6
_SETUP_S = 0.01
_PRIOR_TOKENS = 2000.0  # weight of the prior, as so many tokens
_SMOOTHING = 0.2
_DEADLINE_MIN_S = 1.0  # every message waits for a step on either side
_DEADLINE_MAX_S = 5.0
_DEADLINE_FACTOR = 4.0  # of what was predicted
_GRACE_S = 1.0  # beyond its deadline nobody answers for a transfer any more
_BACKOFF_FIRST_S = 1.0
_BACKOFF_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Whole:
    """A request that stays on one replica.

    Attributes:
        backlog_s: Prefill owed there.
        prefill_s: Of its own prompt there.
        decodes: Sequences that are slowed by it.
        waiting: Requests that would wait for its prefill; none while replicas are free.
    """

    backlog_s: float
    prefill_s: float
    decodes: int
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """The same request on two replicas.

    Attributes:
        backlog_s: Prefill owed where its prompt would be computed.
        prefill_s: Of its own prompt there.
        transfer_s: Between its first and its second token.
        output_tokens: Expected.
        decode_step_s: Between its other tokens.
    """

    backlog_s: float
    prefill_s: float
    transfer_s: float
    output_tokens: int
    decode_step_s: float


def whole_cost_s(whole: Whole) -> float:
    """Return the predicted time until the first token, with what it costs others."""
    others = _INTERFERENCE * whole.decodes + min(whole.waiting, _WAITING_MAX)
    return whole.backlog_s + whole.prefill_s * (1.0 + others)


def split_cost_s(split: Split) -> float:
    """Return the predicted time until the first token, with the pause after it."""
    return split.backlog_s + split.prefill_s + split.transfer_s


def is_split_better(whole: Whole, split: Split, tpot_s: float) -> bool:
    """Return whether a request is to be split.

    Args:
        whole: On the best replica that decodes.
        split: On the best prefill replica, then there.
        tpot_s: The objective of the mean time per output token: the pause is part of it.
    """
    if split.output_tokens < 2:
        return False
    mean_s = split.decode_step_s + split.transfer_s / (split.output_tokens - 1)
    if split.transfer_s and mean_s > tpot_s:
        return False
    return split_cost_s(split) < whole_cost_s(whole)


class TransferTimes:
    """How long a transfer takes, learned; and whether to try one, after some have failed."""

    __slots__ = ("_backoff_s", "_seconds", "_tokens", "_until")

    def __init__(self) -> None:
        self._tokens = _PRIOR_TOKENS
        self._seconds = _PRIOR_TOKENS * _TOKEN_S
        self._backoff_s = 0.0
        self._until = float("-inf")

    def predict_s(self, tokens: int) -> float:
        """Return the predicted time for the blocks of so many tokens."""
        return _SETUP_S + tokens * self._seconds / self._tokens if tokens else 0.0

    def is_usable(self, now: float) -> bool:
        """Return whether transfers are tried: not for a while after one that failed."""
        return now >= self._until

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a transfer that has brought everything."""
        self._backoff_s = 0.0
        self._tokens += _SMOOTHING * (tokens - self._tokens)
        self._seconds += _SMOOTHING * (max(0.0, seconds - _SETUP_S) - self._seconds)

    def failed(self, now: float) -> None:
        """Learn from one that failed: the more of them, the longer none is tried."""
        if not self.is_usable(now):
            return  # it was under way when the first one failed
        self._backoff_s = min(max(_BACKOFF_FIRST_S, 2 * self._backoff_s), _BACKOFF_MAX_S)
        self._until = now + self._backoff_s


@dataclass(frozen=True, slots=True)
class _Move:
    """Blocks on their way to the replica where a slot is booked."""

    slot: Slot
    transfer: Transfer
    started_at: float
    until: float


class Handovers:
    """The split requests of a router between their two replicas.

    Attributes:
        times: Of transfers.
        ready: Slots that were booked before their blocks came, and can be sent now.
        transfers: To be started.
    """

    __slots__ = ("_moves", "ready", "times", "transfers")

    def __init__(self) -> None:
        self.times = TransferTimes()
        self.ready: list[Slot] = []
        self.transfers: list[Transfer] = []
        self._moves: dict[int, _Move] = {}  # by sequence

    def begin(self, cell: "CellBook", slot: Slot, cached_tokens: int, now: float) -> bool:
        """Start to bring a booked slot what it lacks; False: there is nothing to wait for.

        Args:
            cell: Of both replicas.
            slot: Booked on the target.
            cached_tokens: Predicted to be there already.
            now: Time.
        """
        request = slot.request
        source = cell.replicas.get(request.prefilled_on)
        target = cell.replicas[slot.replica_id]
        if source is None or source is target or not self.can_transfer(source, target, now):
            return False
        assert target.limits is not None, "a slot is booked on what is attached"
        block_tokens = target.limits.block_tokens
        first = cached_tokens // block_tokens
        blocks = len(request.hashes) - first
        if blocks <= 0:
            return False
        predicted_s = self.times.predict_s(blocks * block_tokens)
        deadline_s = max(_DEADLINE_FACTOR * predicted_s, _DEADLINE_MIN_S)
        transfer = Transfer(
            slot=slot,
            source=source.replica_id,
            first=first,
            blocks=blocks,
            deadline_s=min(deadline_s, _DEADLINE_MAX_S),
        )
        until = now + transfer.deadline_s + _GRACE_S
        self._moves[slot.sequence] = _Move(slot, transfer, now, until)
        self.transfers.append(transfer)
        target.admitted(slot, (first + blocks) * block_tokens)
        return True

    def can_transfer(self, source: "ReplicaBook", target: "ReplicaBook", now: float) -> bool:
        """Return whether blocks may go from one replica to another now."""
        return (
            self.times.is_usable(now)
            and source.limits is not None
            and target.limits is not None
            and FEATURE in source.limits.features
            and FEATURE in target.limits.features
            and source.limits.block_tokens == target.limits.block_tokens
        )

    def end(self, cells: "Mapping[str, CellBook]", sequence: int, blocks: int, now: float) -> str:
        """Take the end of a transfer; its slot is ready to run, whatever was brought.

        Args:
            cells: All.
            sequence: Of the slot; one that is not waited for any more is ignored.
            blocks: That were brought, in order from the first.
            now: Time.

        Returns:
            How it ended: complete, partial, failed, or abandoned when nobody needs it any more;
            empty when it was ignored.
        """
        move = self._moves.pop(sequence, None)
        if move is None:
            return ""
        transfer, slot = move.transfer, move.slot
        cell = cells.get(slot.request.cell_id)
        target = None if cell is None else cell.replicas.get(slot.replica_id)
        if target is None or target.slots.get(sequence) is not slot:
            return "abandoned"  # the replica was lost meanwhile
        assert target.limits is not None, "only an attached replica holds slots"
        block_tokens = target.limits.block_tokens
        target.admitted(slot, (transfer.first + blocks) * block_tokens)
        self.ready.append(slot)
        if not slot.is_open:
            return "abandoned"
        if blocks < transfer.blocks:
            self.times.failed(now)
            return "partial" if blocks else "failed"
        self.times.observe(blocks * block_tokens, now - move.started_at)
        return "complete"

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way or to be sent."""
        return not (self._moves or self.ready or self.transfers)

    def overdue(self, now: float) -> list[int]:
        """Return the transfers that nobody has answered for."""
        return [sequence for sequence, move in self._moves.items() if move.until <= now]

    def next_at(self) -> float:
        """Return when the next transfer is overdue; inf: none is under way."""
        moves = self._moves
        return min(move.until for move in moves.values()) if moves else float("inf")


# --- where placement asks -------------------------------------------------------------------


def opens_at(cell: "CellBook", now: float) -> float:
    """Return when the next prefill replica may be sent something; inf: there is none."""
    return min((book.opens_at(now) for book in cell.prefillers.values()), default=float("inf"))


def refine(
    handovers: Handovers, cell: "CellBook", request: Request, whole: Choice, now: float
) -> Choice | None:
    """Return a choice anew in a cell with prefill replicas: whole as it was, or split.

    None: the better one of both opens later, and is worth the wait.
    """
    split = _best_split(handovers, cell, request, whole, now)
    if split is None:
        return whole if cell.opens_at(now) <= now else None
    return split if split.book.opens_at(now) <= now else None


def _best_split(
    handovers: Handovers, cell: "CellBook", request: Request, whole: Choice, now: float
) -> Choice | None:
    target = whole.book
    if request.output or request.output_max < 2 or not request.hashes:
        return None
    if target.limits is None or request.prompt_tokens >= target.limits.prompt_tokens_max:
        return None  # its first token is its last
    matches = cell.index.matches(request.hashes)
    best: Choice | None = None
    for book in cell.prefillers.values():
        if not (_may_prefill(book, request) and handovers.can_transfer(book, target, now)):
            continue
        cached = placement.cached_tokens(book, request, matches)
        prefill_s = book.prefill_s(request.prompt_tokens - cached, cached)
        cost_s = book.backlog_s(now) + prefill_s
        if best is None or cost_s < best.cost_s:
            best = Choice(book, cached, cost_s, is_split=True)
    if best is None:
        return None
    backlog_s = best.book.backlog_s(now)
    uncached = request.prompt_tokens - whole.cached_tokens
    decode_step_s = target.speed.decode_step_s
    as_whole = Whole(
        backlog_s=target.backlog_s(now),
        prefill_s=target.prefill_s(uncached, whole.cached_tokens),
        decodes=len(target.slots),
        waiting=cell.queue.requests - 1 if cell.opens_at(now) > now else 0,
    )
    as_split = Split(
        backlog_s=backlog_s,
        prefill_s=best.cost_s - backlog_s,
        # What comes over waits for the target's step in flight, just as a whole prompt does.
        transfer_s=handovers.times.predict_s(uncached) + decode_step_s / 2,
        output_tokens=cell.output_expected(request),
        decode_step_s=decode_step_s,
    )
    return best if is_split_better(as_whole, as_split, cell.config.tpot_s) else None


def _may_prefill(book: "ReplicaBook", request: Request) -> bool:
    limits = book.limits
    return (
        limits is not None
        and book.may_take
        and len(book.slots) < limits.sequences_max
        and request.prompt_tokens <= limits.prompt_tokens_max
        and (limits.adapter_slots > 0 or not request.adapter)
        and book.replica_id != request.avoid
        and book.fits(request.prompt_tokens, 1)
    )
