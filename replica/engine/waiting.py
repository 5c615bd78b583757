"""The queue of sequences that do not run: who is next, where adapters compete for slots.

The order is that of `ScheduledSequence.rank`. A sequence whose adapter is in no slot, while all
slots are busy, is passed over, so that it does not block those behind it. Those behind it must not
keep it out for ever by keeping the slots busy: when OVERTAKEN_MAX of them with adapters have been
admitted before the first one passed over, that one claims the slot with the fewest sequences.
Nobody behind it joins that slot any more; it is empty when those who use it, and those who wait for
it in front, have ended. Only the first one passed over has a claim; for the next the counting
begins anew.
"""

from heapq import heapify, heappop, heappush

from replica.engine.adapter_table import AdapterTable
from replica.engine.plan import ScheduledSequence

# Sequences of resident adapters that may go first: batches of one adapter are cheaper than loads.
OVERTAKEN_MAX = 32
# Ended sequences that may lie between living ones before they are cleared out.
_DEAD_MAX = 32
_Entry = tuple[tuple[int, int], ScheduledSequence]


class WaitingQueue:
    """Sequences by rank, in one heap per adapter."""

    def __init__(self, adapters: AdapterTable) -> None:
        self.count = 0
        self.tokens = 0  # of all sequences together
        self._adapters = adapters
        self._heaps: dict[str, list[_Entry]] = {}
        self._dead = 0  # ended ones that are still in the heaps
        self._claimant: ScheduledSequence | None = None
        self._overtaken = 0
        self._claimed_slot: int | None = None

    def push(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence at the place that its rank gives it."""
        heap = self._heaps.setdefault(sequence.request.adapter_digest, [])
        heappush(heap, (sequence.rank(), sequence))
        self.count += 1
        self.tokens += len(sequence.tokens)

    def first(self) -> ScheduledSequence | None:
        """Return the first one that may have a slot for its adapter; it stays in the queue."""
        heads = self._heads()
        passed_over = min((entry for entry in heads if self._lacks_slot(entry)), default=None)
        claimant = None if passed_over is None else passed_over[1]
        if claimant is not self._claimant:
            self._claimant = claimant
            self._overtaken = 0
            self._claimed_slot = None
        elif claimant is not None and self._overtaken >= OVERTAKEN_MAX:
            if self._claimed_slot is None:
                self._claimed_slot = self._adapters.least_busy_slot()
        allowed = (e for e in heads if not self._lacks_slot(e) and not self._is_held_back(e))
        best = min(allowed, default=None)
        return None if best is None else best[1]

    def pop(self, sequence: ScheduledSequence) -> None:
        """Take out what `first` returned, because it is admitted."""
        digest = sequence.request.adapter_digest
        _, popped = heappop(self._heaps[digest])
        assert popped is sequence, sequence.request.key
        self.count -= 1
        self.tokens -= len(sequence.tokens)
        if digest and self._claimant is not None and self._claimant.rank() < sequence.rank():
            self._overtaken += 1

    def discard(self, sequence: ScheduledSequence) -> None:
        """Note that a sequence has ended while it waited; its `ended` is set by now or soon."""
        self.count -= 1
        self.tokens -= len(sequence.tokens)
        self._dead += 1

    def _heads(self) -> list[_Entry]:
        if self._dead > self.count + _DEAD_MAX:
            self._clear_out()
        heads: list[_Entry] = []
        for digest in list(self._heaps):
            heap = self._heaps[digest]
            while heap and heap[0][1].ended:
                heappop(heap)
                self._dead -= 1
            if heap:
                heads.append(heap[0])
            else:
                del self._heaps[digest]
        return heads

    def _lacks_slot(self, entry: _Entry) -> bool:
        digest = entry[1].request.adapter_digest
        adapters = self._adapters
        return bool(digest) and not adapters.has_room and adapters.slot_of(digest) is None

    def _is_held_back(self, entry: _Entry) -> bool:
        if self._claimed_slot is None or self._claimant is None:
            return False
        slot = self._adapters.slot_of(entry[1].request.adapter_digest)
        return slot == self._claimed_slot and self._claimant.rank() < entry[0]

    def _clear_out(self) -> None:
        for digest, heap in self._heaps.items():
            self._heaps[digest] = living = [entry for entry in heap if not entry[1].ended]
            heapify(living)
        self._dead = 0
