"""Moves split requests from their prefill replica to their decode replica.

A prefill replica computes the prompt of a split request and the first token of the answer. Then the
KV blocks of the prompt are copied to a decode replica, which generates the rest of the answer. If
the copy fails, the decode replica computes the prompt again, so that the answer is only delayed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from router.core.cell import CellBook
from router.core.decide import placement
from router.core.decide.disaggregation import PrefillSplit, TransferTimes, Whole, is_split_better
from router.core.decide.placement import PlacementChoice
from router.core.fleet.replica import ReplicaBook
from router.core.types.actions import Transfer
from router.core.types.request import Dispatch, Request

FEATURE = "kv_transfer"  # feature of engines that can export and import KV blocks
_DEADLINE_MIN_S = 1.0  # least deadline of a transfer, since messages wait for steps on both sides
_DEADLINE_MAX_S = 5.0
_DEADLINE_FACTOR = 4.0  # deadline of a transfer as a multiple of the predicted duration
_GRACE_S = 1.0  # seconds after the deadline, until the core stops waiting for the shell's report


@dataclass(frozen=True, slots=True)
class _Move:
    """A transfer in progress to the replica of a dispatch."""

    dispatch: Dispatch
    transfer: Transfer
    started_at: float
    until: float


class Handovers:
    """The split requests of a router between their two replicas.

    Attributes:
        times: Learned durations of transfers.
        ready: Dispatches to send to their replicas, because their transfer is over or not needed.
        transfers: Transfers to start at the next tick.
    """

    __slots__ = ("_moves", "ready", "times", "transfers")

    def __init__(self) -> None:
        self.times = TransferTimes()
        self.ready: list[Dispatch] = []
        self.transfers: list[Transfer] = []
        self._moves: dict[int, _Move] = {}  # moves by sequence number

    def begin(self, cell: CellBook, dispatch: Dispatch, cached_tokens: int, now: float) -> bool:
        """Start the transfer of a dispatch's missing KV blocks, and return whether it was started.

        Args:
            cell: The cell of both replicas.
            dispatch: Dispatch on the decode replica.
            cached_tokens: Prompt tokens that the decode replica is predicted to have cached.
            now: Time, in seconds.
        """
        request = dispatch.request
        source = cell.fleet.replicas.get(request.prefilled_on)
        target = cell.fleet.replicas[dispatch.replica_id]
        if source is None or source is target or not self.can_transfer(source, target, now):
            return False
        assert target.limits is not None, "a dispatch is booked on what is attached"
        block_tokens = target.limits.block_tokens
        first = cached_tokens // block_tokens
        blocks = len(request.hashes) - first
        if blocks <= 0:
            return False
        predicted_s = self.times.predict_s(blocks * block_tokens)
        deadline_s = max(_DEADLINE_FACTOR * predicted_s, _DEADLINE_MIN_S)
        transfer = Transfer(
            dispatch=dispatch,
            source=source.replica_id,
            first=first,
            blocks=blocks,
            deadline_s=min(deadline_s, _DEADLINE_MAX_S),
        )
        until = now + transfer.deadline_s + _GRACE_S
        self._moves[dispatch.sequence] = _Move(dispatch, transfer, now, until)
        self.transfers.append(transfer)
        target.admitted(dispatch, (first + blocks) * block_tokens)
        return True

    def can_transfer(self, source: ReplicaBook, target: ReplicaBook, now: float) -> bool:
        """Return whether KV blocks can be copied from one replica to another now."""
        return (
            self.times.is_usable(now)
            and source.limits is not None
            and target.limits is not None
            and FEATURE in source.limits.features
            and FEATURE in target.limits.features
            and source.limits.block_tokens == target.limits.block_tokens
        )

    def end(self, cells: Mapping[str, CellBook], sequence: int, blocks: int, now: float) -> str:
        """Record the end of a transfer. Its dispatch is sent even if the transfer failed.

        Args:
            cells: All cells, by id.
            sequence: Sequence number of the dispatch. An unknown number is ignored.
            blocks: Number of leading blocks that arrived.
            now: Time, in seconds.

        Returns:
            "complete", "partial" or "failed". The result is "abandoned" if the request no longer
            needs the blocks, and an empty string for an unknown sequence.
        """
        move = self._moves.pop(sequence, None)
        if move is None:
            return ""
        transfer, dispatch = move.transfer, move.dispatch
        cell = cells.get(dispatch.request.cell_id)
        target = None if cell is None else cell.fleet.replicas.get(dispatch.replica_id)
        if target is None or target.dispatches.get(sequence) is not dispatch:
            return "abandoned"  # the replica was lost meanwhile
        assert target.limits is not None, "only an attached replica holds dispatches"
        block_tokens = target.limits.block_tokens
        target.admitted(dispatch, (transfer.first + blocks) * block_tokens)
        self.ready.append(dispatch)
        if not dispatch.is_open:
            return "abandoned"
        if blocks < transfer.blocks:
            self.times.failed(now)
            return "partial" if blocks else "failed"
        self.times.observe(blocks * block_tokens, now - move.started_at)
        return "complete"

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is in progress or waiting, and no dispatch is waiting."""
        return not (self._moves or self.ready or self.transfers)

    def overdue(self, now: float) -> list[int]:
        """Return the sequences whose transfer has passed its deadline without a report."""
        return [sequence for sequence, move in self._moves.items() if move.until <= now]

    def next_at(self) -> float:
        """Return the time at which the next transfer is overdue, or inf without a transfer."""
        moves = self._moves
        return min(move.until for move in moves.values()) if moves else float("inf")

    def refine(
        self, cell: CellBook, request: Request, whole: PlacementChoice, now: float
    ) -> PlacementChoice | None:
        """Return the better placement, either `whole` on one replica or a split between two.

        The result is None if the better placement is on a replica whose next step is still full.
        The request then waits for that replica.
        """
        if not cell.fleet.open_prefillers:
            return whole
        split = self._best_split(cell, request, whole, now)
        if split is None:
            return whole if cell.fleet.opens_at(now) <= now else None
        return split if split.book.opens_at(now) <= now else None

    def _best_split(
        self, cell: CellBook, request: Request, whole: PlacementChoice, now: float
    ) -> PlacementChoice | None:
        target = whole.book
        if request.output or request.output_max < 2 or not request.hashes:
            return None
        if target.limits is None or request.prompt_tokens >= target.limits.prompt_tokens_max:
            return None  # the context has room for one output token only
        matches = cell.fleet.index.matches(request.hashes)
        best: PlacementChoice | None = None
        for book in cell.fleet.open_prefillers.values():
            if not (_may_prefill(book, request) and self.can_transfer(book, target, now)):
                continue
            cached = placement.cached_tokens(book, request, matches)
            prefill_s = book.prefill_s(request.prompt_tokens - cached, cached)
            cost_s = book.backlog_s(now) + prefill_s
            if best is None or cost_s < best.cost_s:
                best = PlacementChoice(book, cached, cost_s, is_split=True)
        if best is None:
            return None
        backlog_s = best.book.backlog_s(now)
        uncached = request.prompt_tokens - whole.cached_tokens
        decode_step_s = target.speed.decode_step_s
        as_whole = Whole(
            backlog_s=target.backlog_s(now),
            prefill_s=target.prefill_s(uncached, whole.cached_tokens),
            decodes=len(target.dispatches),
            waiting=cell.queue.requests - 1 if cell.fleet.opens_at(now) > now else 0,
        )
        as_split = PrefillSplit(
            backlog_s=backlog_s,
            prefill_s=best.cost_s - backlog_s,
            # Transferred blocks wait for the end of the target's current step, like any prompt.
            transfer_s=self.times.predict_s(uncached) + decode_step_s / 2,
            output_tokens=cell.output_expected(request),
            decode_step_s=decode_step_s,
        )
        return best if is_split_better(as_whole, as_split, cell.config.tpot_s) else None


def _may_prefill(book: ReplicaBook, request: Request) -> bool:
    limits = book.limits
    return (
        limits is not None
        and book.may_take
        and len(book.dispatches) < limits.sequences_max
        and request.prompt_tokens <= limits.prompt_tokens_max
        and (limits.adapter_slots > 0 or not request.adapter)
        and book.replica_id != request.avoid
        and book.fits(request.prompt_tokens, 1)
    )
