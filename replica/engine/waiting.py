"""Queues waiting sequences, and decides which of them receives an adapter slot next.

The order is that of `ScheduledSequence.rank`. If all slots are busy, a sequence whose adapter is in
no slot is skipped, so that the sequences behind it can run. But their adapters could occupy the
slots forever, and the skipped sequence would starve. So the queue counts the sequences that
overtake the first skipped sequence. After OVERTAKEN_MAX of them, the skipped sequence claims the
slot with the fewest sequences. From then on, no sequence behind the claimant is admitted to that
slot. The slot becomes empty when its sequences, and those before the claimant that wait for it,
have ended. Only the first skipped sequence has a claim, and the count then starts again.
"""

from heapq import heapify, heappop, heappush

from replica.engine.adapter_table import AdapterTable
from replica.engine.plan import ScheduledSequence

# Number of sequences that may overtake a skipped one. It is large, because a batch with few
# adapters is cheaper than loads of adapters.
OVERTAKEN_MAX = 32
# Largest number of ended sequences in the heaps, beyond the number of living ones.
_DEAD_MAX = 32
_Entry = tuple[tuple[int, int], ScheduledSequence]


class WaitingQueue:
    """The waiting sequences by rank, in one heap per adapter."""

    def __init__(self, adapters: AdapterTable) -> None:
        self.count = 0
        self.tokens = 0  # sum of the tokens of all waiting sequences
        self._adapters = adapters
        # adapter digest -> heap of its waiting sequences, which is never empty
        self._heaps: dict[str, list[_Entry]] = {}
        self._heads: dict[str, _Entry] = {}  # adapter digest -> first entry of its heap
        # first sequence that is skipped for lack of a slot, or None if it must be computed again
        self._passed_over: ScheduledSequence | None = None
        # adapters in slots when `_passed_over` was computed
        self._passed_over_by: tuple[str, ...] = ()
        self._dead = 0  # number of ended sequences that are still in the heaps
        self._claimant: ScheduledSequence | None = None
        self._overtaken = 0
        self._claimed_slot: int | None = None

    def push(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence at the position of its rank."""
        digest = sequence.request.adapter_digest
        heap = self._heaps.setdefault(digest, [])
        heappush(heap, (sequence.rank(), sequence))
        self._heads[digest] = heap[0]
        self._passed_over = None
        self.count += 1
        self.tokens += len(sequence.tokens)

    def first(self) -> ScheduledSequence | None:
        """Return the first sequence whose adapter can have a slot. It stays in the queue."""
        heads = self._heads
        if self._adapters.has_room or not heads:
            self._note_claimant(None)
            return min(heads.values())[1] if heads else None
        resident = ("", *self._adapters.resident)
        ready = [heads[digest] for digest in resident if digest in heads]
        passed_over = None if len(ready) == len(heads) else self._first_without_slot()
        self._note_claimant(passed_over)
        if self._claimed_slot is not None:
            ready = [entry for entry in ready if not self._is_held_back(entry)]
        return min(ready)[1] if ready else None

    def pop(self, sequence: ScheduledSequence) -> None:
        """Remove the sequence that `first` returned, after its admission."""
        digest = sequence.request.adapter_digest
        _, popped = heappop(self._heaps[digest])
        assert popped is sequence, sequence.request.key
        self._refresh(digest)
        self.count -= 1
        self.tokens -= len(sequence.tokens)
        if digest and self._claimant is not None and self._claimant.rank() < sequence.rank():
            self._overtaken += 1

    def discard(self, sequence: ScheduledSequence) -> None:
        """Remove a sequence that ends while it waits."""
        # the heap still contains the sequence, until it is first or until the next cleanup
        sequence.ended = True
        self.count -= 1
        self.tokens -= len(sequence.tokens)
        self._dead += 1
        digest = sequence.request.adapter_digest
        if self._heads[digest][1] is sequence:
            self._refresh(digest)
        if self._dead > self.count + _DEAD_MAX:
            for digest, heap in self._heaps.items():
                self._heaps[digest] = living = [entry for entry in heap if not entry[1].ended]
                heapify(living)
            self._dead = 0

    def _refresh(self, digest: str) -> None:
        """Remove ended sequences from the top of an adapter's heap, and update its first entry."""
        self._passed_over = None
        heap = self._heaps[digest]
        while heap and heap[0][1].ended:
            heappop(heap)
            self._dead -= 1
        if heap:
            self._heads[digest] = heap[0]
        else:
            del self._heaps[digest], self._heads[digest]

    def _first_without_slot(self) -> ScheduledSequence:
        """Return the first sequence whose adapter is in no slot. The result is cached."""
        resident = self._adapters.resident
        if self._passed_over is None or self._passed_over_by is not resident:
            slot_of = self._adapters.slot_of
            lacking = (e for digest, e in self._heads.items() if digest and slot_of(digest) is None)
            self._passed_over = min(lacking)[1]
            self._passed_over_by = resident
        return self._passed_over

    def _note_claimant(self, claimant: ScheduledSequence | None) -> None:
        if claimant is not self._claimant:
            self._claimant = claimant
            self._overtaken = 0
            self._claimed_slot = None
        elif self._overtaken >= OVERTAKEN_MAX and self._claimed_slot is None:
            self._claimed_slot = self._adapters.least_busy_slot()

    def _is_held_back(self, entry: _Entry) -> bool:
        assert self._claimant is not None
        slot = self._adapters.slot_of(entry[1].request.adapter_digest)
        return slot == self._claimed_slot and self._claimant.rank() < entry[0]
