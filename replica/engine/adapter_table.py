"""Tracks an engine's adapters, in host memory within a byte budget and in the slots of a batch.

A slot is *busy* while running sequences use its adapter. Otherwise the slot is *idle*, and another
adapter may replace its adapter. The longest unused adapter is replaced first. The table only
records the state. The backend copies the adapters that `StepPlan.loads` lists.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from replica.engine.plan import Adapter
from replica.engine.types import AdapterState, RefusedError
from sluice.errors import ErrorCode

# Number of evicted adapters whose counters stay stored. A returning adapter continues its counts.
_FORGOTTEN_MAX = 4096


@dataclass(slots=True)
class _Usage:
    prompt_tokens: int = 0
    output_tokens: int = 0
    loads: int = 0


@dataclass(slots=True)
class _Entry:
    adapter: Adapter
    usage: _Usage
    slot: int | None = None
    living: int = 0  # number of waiting and running sequences
    running: int = 0  # number of sequences in the batch
    is_dropped: bool = False


class AdapterTable:
    """The adapters in host memory, by digest."""

    def __init__(self, slots: int, memory_bytes: int) -> None:
        """Create an empty table.

        Args:
            slots: Number of adapters in one batch, or 0 if no adapter can be served.
            memory_bytes: Largest number of bytes of all adapters in host memory together.
        """
        self.memory_bytes = memory_bytes
        self._used_bytes = 0
        # the longest unused adapter is first
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._slots: list[str | None] = [None] * slots
        # adapters in idle slots, the longest unused first
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._empty = list(range(slots))[::-1]
        self._loads: list[tuple[int, Adapter]] = []
        self._forgotten: OrderedDict[str, _Usage] = OrderedDict()
        self._resident: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        """Number of adapters that fit into one batch."""
        return len(self._slots)

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests of adapters in slots, sorted. The tuple object changes only with its content."""
        return self._resident

    def put(self, digest: str, adapter: Adapter) -> None:
        """Store an adapter in host memory. The longest unused adapters are evicted to make room.

        Raises:
            RefusedError: With UNSUPPORTED_PARAMETER if there are no slots, or with ADAPTER_INVALID
                if the adapter alone exceeds the budget. With ENGINE_BUSY if adapters in use leave
                too little of the budget.
        """
        if not self._slots:
            raise RefusedError(
                ErrorCode.UNSUPPORTED_PARAMETER, "this engine serves its base alone, no adapters"
            )
        known = self._entries.get(digest)
        if known is not None:
            known.is_dropped = False
            self._entries.move_to_end(digest)
            return
        self._make_room(digest, adapter.memory_bytes)
        usage = self._forgotten.pop(digest, None) or _Usage()
        self._entries[digest] = _Entry(adapter, usage)
        self._used_bytes += adapter.memory_bytes

    def drop(self, digest: str) -> None:
        """Drop an adapter once it has no living sequence. New sequences cannot use it any more."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.is_dropped = True
            if not entry.living:
                self._forget(digest)

    def has(self, digest: str) -> bool:
        """Whether new sequences may use this adapter."""
        entry = self._entries.get(digest)
        return entry is not None and not entry.is_dropped

    def states(self, emitted: Mapping[str, int]) -> list[AdapterState]:
        """Return all adapters. `emitted` has the output tokens of living sequences by adapter."""
        return [
            AdapterState(
                digest=digest,
                is_in_slot=entry.slot is not None,
                rank=entry.adapter.rank,
                memory_bytes=entry.adapter.memory_bytes,
                sequences=entry.living,
                prompt_tokens=entry.usage.prompt_tokens,
                output_tokens=entry.usage.output_tokens + emitted.get(digest, 0),
                loads=entry.usage.loads,
            )
            for digest, entry in self._entries.items()
        ]

    def join(self, digest: str) -> None:
        """Count a new sequence of an adapter. The adapter stays in memory until `leave`."""
        self._entries[digest].living += 1
        self._entries.move_to_end(digest)

    def leave(self, digest: str, output_tokens: int) -> None:
        """Subtract a sequence that has ended, and add its output tokens to those of the adapter."""
        entry = self._entries[digest]
        entry.living -= 1
        entry.usage.output_tokens += output_tokens
        self._entries.move_to_end(digest)
        if entry.is_dropped and not entry.living:
            self._forget(digest)

    def count_prompt(self, digest: str, tokens: int) -> None:
        """Add the prompt tokens of a sequence at its first admission."""
        self._entries[digest].usage.prompt_tokens += tokens

    def slot_of(self, digest: str) -> int | None:
        """Return the slot of an adapter, or None if the adapter is in no slot."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.slot

    @property
    def has_room(self) -> bool:
        """Whether an adapter can be loaded now, because a slot is empty or idle."""
        return bool(self._empty or self._idle)

    def least_busy_slot(self) -> int:
        """Return the slot with the fewest running sequences. The table must have a slot."""
        running = [self._entries[digest].running if digest else 0 for digest in self._slots]
        return running.index(min(running))

    def acquire(self, digest: str) -> int:
        """Reserve an adapter's slot for one more running sequence, and return the slot.

        The adapter must be in a slot already, or `has_room` must be true.
        """
        entry = self._entries[digest]
        if entry.slot is None:
            entry.slot = self._take_slot()
            entry.usage.loads += 1
            self._slots[entry.slot] = digest
            self._loads.append((entry.slot, entry.adapter))
            self._note_residents()
        self._idle.pop(digest, None)
        entry.running += 1
        return entry.slot

    def release(self, digest: str) -> None:
        """Subtract a running sequence of an adapter, whose slot may thus become idle."""
        entry = self._entries[digest]
        entry.running -= 1
        assert entry.running >= 0, digest
        if not entry.running:
            self._idle[digest] = None

    def take_loads(self) -> list[tuple[int, Adapter]]:
        """Return the adapters to load into slots before the next step."""
        loads, self._loads = self._loads, []
        return loads

    def redo_loads(self, loads: list[tuple[int, Adapter]]) -> None:
        """List the loads of a failed step again, except for adapters that have left their slots."""
        for slot, adapter in loads:
            digest = self._slots[slot]
            if digest is None:
                continue
            if self._entries[digest].running:
                self._loads.append((slot, adapter))
            else:
                self._vacate(digest)

    def check(self) -> None:
        """Assert that the bookkeeping of slots and memory is consistent. Only tests use this."""
        in_slots = {digest: slot for slot, digest in enumerate(self._slots) if digest}
        assert in_slots == {d: e.slot for d, e in self._entries.items() if e.slot is not None}
        busy = {digest for digest, entry in self._entries.items() if entry.running}
        assert self._idle.keys() == in_slots.keys() - busy
        assert busy <= in_slots.keys()
        assert len(in_slots) + len(self._empty) == len(self._slots)
        assert self._resident == tuple(sorted(in_slots))
        used = sum(entry.adapter.memory_bytes for entry in self._entries.values())
        assert used == self._used_bytes <= self.memory_bytes
        for entry in self._entries.values():
            assert 0 <= entry.running <= entry.living
            assert entry.living or not entry.is_dropped

    def _make_room(self, digest: str, needed_bytes: int) -> None:
        if needed_bytes > self.memory_bytes:
            raise RefusedError(
                ErrorCode.ADAPTER_INVALID,
                f"adapter {digest[:12]} takes {needed_bytes} bytes; the engine has"
                f" {self.memory_bytes} for all adapters (its option adapter_memory_bytes)",
            )
        free_bytes = self.memory_bytes - self._used_bytes
        unused: list[str] = []
        for name, entry in self._entries.items():
            if free_bytes >= needed_bytes:
                break
            if not entry.living:
                unused.append(name)
                free_bytes += entry.adapter.memory_bytes
        if free_bytes < needed_bytes:
            raise RefusedError(
                ErrorCode.ENGINE_BUSY,
                f"adapter {digest[:12]} takes {needed_bytes} bytes, and sequences use what fills"
                f" the {self.memory_bytes} bytes for adapters; try again when some have ended",
            )
        for name in unused:
            self._forget(name)

    def _forget(self, digest: str) -> None:
        entry = self._entries[digest]
        assert not entry.living, digest
        if entry.slot is not None:
            self._vacate(digest)
        del self._entries[digest]
        self._used_bytes -= entry.adapter.memory_bytes
        self._forgotten[digest] = entry.usage
        if len(self._forgotten) > _FORGOTTEN_MAX:
            self._forgotten.popitem(last=False)

    def _take_slot(self) -> int:
        if not self._empty:
            self._vacate(next(iter(self._idle)))
        return self._empty.pop()

    def _vacate(self, digest: str) -> None:
        """Empty the idle slot of an adapter."""
        entry = self._entries[digest]
        assert entry.slot is not None
        assert not entry.running, digest
        del self._idle[digest]
        self._slots[entry.slot] = None
        self._empty.append(entry.slot)
        self._loads = [load for load in self._loads if load[0] != entry.slot]
        entry.slot = None
        self._note_residents()

    def _note_residents(self) -> None:
        self._resident = tuple(sorted(digest for digest in self._slots if digest))
