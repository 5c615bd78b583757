"""Which replica of a cell holds which KV block: what placement knows about prefix caches.

It is told what was dispatched and what engines report, and never walks over a prompt to answer:
block hashes form chains, and engines evict the tails first, so that whoever holds a block holds all
before it, nearly always. Where that is not so for a moment, an answer is a little wrong and the
engine computes what it lacks.

Blocks that came together are kept together, as a *run*: consecutive blocks of a chain with the same
holders. To use a known prompt again costs as much as it has runs, not blocks.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import overload

from sluice.hashing import HASH_BYTES

# An engine's removal that reaches us so soon after our own dispatch of the block is older than that
# dispatch, or is made good by it: the engine computes the block again.
REMOVAL_GUARD_S = 5.0
# An engine that reports evictions says itself what is gone; until it has, its replica may seem to
# hold this share more. Guessing what it evicts would forget blocks that nobody reports again.
_REPORT_SLACK_RATIO = 0.125
_RUN_MAX = 256  # blocks; bounds what it costs to take a run apart
# A dictionary that is full is copied as a whole, and its router stands still meanwhile: 150 ms for
# two million blocks in one.
_SHARDS = 256
_SHARD_MASK = _SHARDS - 1
_NAMES_KEPT = 4096
_LONG_AGO = float("-inf")


class BlockHashes(Sequence[int]):
    """The block hashes of a prompt or of a report, read from the bytes they came in.

    Only the first eight bytes of each hash are used: among ten million blocks, one pair in 370,000
    indices is mistaken for another, and what that spoils is a prediction. Such keys need less
    memory than the bytes, and cost nothing to make.

    Attributes:
        view: The same, without a call into Python for each hash.
    """

    __slots__ = ("view",)

    def __init__(self, data: bytes) -> None:
        """Look at concatenated hashes.

        Raises:
            ValueError: The last one is cut off.
        """
        if len(data) % HASH_BYTES:
            raise ValueError(f"{len(data)} bytes of block hashes, not a multiple of {HASH_BYTES}")
        self.view = memoryview(data).cast("Q")[:: HASH_BYTES // 8]

    def __len__(self) -> int:
        return len(self.view)

    def __iter__(self) -> Iterator[int]:
        return iter(self.view.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.view[index]


class _Run:
    """Consecutive blocks of a chain.

    Attributes:
        keys: Their hashes, in the order of the chain; never empty.
        holders: The bits of the replicas that hold all of them.
    """

    __slots__ = ("holders", "keys")

    def __init__(self, keys: list[Hashable], holders: int) -> None:
        self.keys = keys
        self.holders = holders


class _Use:
    """One dispatch or report: what of a replica was used last at that time.

    Attributes:
        at: Of a dispatch; long ago for what only the engine has told of.
        runs: In the order of the prompt; the last is evicted first.
    """

    __slots__ = ("at", "runs")

    def __init__(self, at: float) -> None:
        self.at = at
        self.runs: list[_Run] = []


class _Held:
    """What one replica holds.

    Attributes:
        kv_blocks: Size of its cache.
        blocks: How many it holds.
        uses: Run -> number of its last use.
        by_age: Number -> use; the least recent first, none without runs.
    """

    __slots__ = (
        *("bit", "blocks", "by_age", "has_events", "kv_blocks", "replica_id", "slot", "uses"),
    )

    def __init__(self, replica_id: str, slot: int, kv_blocks: int) -> None:
        self.replica_id = replica_id
        self.slot = slot
        self.bit = 1 << slot
        self.kv_blocks = kv_blocks
        self.has_events = False
        self.blocks = 0
        self.uses: dict[_Run, int] = {}
        self.by_age: dict[int, _Use] = {}

    @property
    def room(self) -> int:
        """How many blocks it may hold."""
        slack = int(self.kv_blocks * _REPORT_SLACK_RATIO) if self.has_events else 0
        return self.kv_blocks + slack

    def unuse(self, run: _Run) -> None:
        """Take a run out of its last use."""
        number = self.uses.pop(run)
        use = self.by_age[number]
        use.runs.remove(run)
        if not use.runs:
            del self.by_age[number]


class PrefixIndex:
    """The blocks of all replicas of a cell; calls about unknown replicas change nothing."""

    def __init__(self) -> None:
        self._shards: list[dict[Hashable, _Run]] = [{} for _ in range(_SHARDS)]
        self._held: dict[str, _Held] = {}
        self._slots: list[_Held | None] = []
        self._numbers = 0  # of uses
        self._names: dict[int, tuple[str, ...]] = {}  # of sets of holders that were asked for

    def __len__(self) -> int:
        """Return how many pairs of a replica and a block are known."""
        return sum(held.blocks for held in self._held.values())

    def add_replica(self, replica_id: str, kv_blocks: int) -> None:
        """Begin with a replica that holds nothing; one that is known is begun anew."""
        self.drop_replica(replica_id)
        if None not in self._slots:
            self._slots.append(None)
        slot = self._slots.index(None)
        self._slots[slot] = self._held[replica_id] = _Held(replica_id, slot, kv_blocks)
        self._names.clear()

    def drop_replica(self, replica_id: str) -> None:
        """Forget a replica."""
        held = self._held.pop(replica_id, None)
        if held is not None:
            self._clear(held)
            self._slots[held.slot] = None
            self._names.clear()

    def reset(self, replica_id: str) -> None:
        """Forget what a replica holds: its engine is about to say everything anew."""
        held = self._held.get(replica_id)
        if held is not None:
            self._clear(held)
            held.has_events = True

    def dispatched(self, replica_id: str, hashes: Sequence[Hashable], now: float) -> None:
        """Note that a replica will hold all blocks of a prompt, and has just used them."""
        held = self._held.get(replica_id)
        if held is None or not len(hashes):
            return
        keys = list(hashes)
        use = self._begin(held, now)
        start = 0
        while start < len(keys):
            run = self._find(keys[start])
            run = self._make(keys, start) if run is None else self._cut(run, keys, start)
            self._use(held, run, use)
            start += len(run.keys)
        self._join(held, use)
        self._shrink(held)

    def stored(self, replica_id: str, hashes: Sequence[Hashable], now: float) -> None:
        """Note what an engine says it has cached, now or a few seconds ago."""
        del now  # a dispatch that we know of is not older
        held = self._held.get(replica_id)
        if held is None:
            return
        held.has_events = True
        keys = list(hashes)
        use = self._begin(held, _LONG_AGO)
        start = 0
        while start < len(keys):
            run = self._find(keys[start])
            if run is not None and run.holders & held.bit:
                start += _stretch(run.keys, keys, start, 1)
                continue
            run = self._make(keys, start) if run is None else self._cut(run, keys, start)
            self._use(held, run, use)
            start += len(run.keys)
        if not use.runs:
            del held.by_age[self._numbers]
        self._shrink(held)

    def removed(self, replica_id: str, hashes: Sequence[Hashable], now: float) -> None:
        """Note what an engine says it has evicted, unless that is older than our last dispatch."""
        held = self._held.get(replica_id)
        if held is None:
            return
        held.has_events = True
        newest = now - REMOVAL_GUARD_S
        gone: dict[_Run, set[Hashable]] = {}
        keys = list(hashes)
        start = 0
        while start < len(keys):
            run = self._find(keys[start])
            count = 1
            if run is not None and run.holders & held.bit:
                count = _stretch(run.keys, keys, start, -1)  # engines evict the tails first
                if held.by_age[held.uses[run]].at <= newest:
                    gone.setdefault(run, set()).update(keys[start : start + count])
            start += count
        for run, lost in gone.items():
            self._lose_some(held, run, lost)

    def matches(self, hashes: Sequence[Hashable]) -> dict[str, int]:
        """Return how many leading blocks of a prompt each replica holds; holders only.

        About log2(blocks) lookups for each different set of holders along the prompt.
        """
        if isinstance(hashes, BlockHashes):
            hashes = hashes.view
        size = len(hashes)
        first = self._find(hashes[0]) if size else None
        found: dict[str, int] = {}
        if first is None:
            return found
        shards = self._shards
        # Of blocks [low, high): who holds the first of them, and who holds the one after the last.
        ranges = [(0, first.holders, size, 0)]
        while ranges:
            low, holders, high, beyond = ranges.pop()
            while holders != beyond and high - low > 1:
                middle = (low + high) >> 1
                key = hashes[middle]
                run = shards[hash(key) & _SHARD_MASK].get(key)
                there = beyond if run is None else run.holders & holders | beyond
                if there != beyond:
                    ranges.append((middle, there, high, beyond))
                high, beyond = middle, there
            ending = holders ^ beyond
            if ending:
                names = self._names.get(ending) or self._name(ending)
                ends = dict.fromkeys(names, high)
                found = found | ends if found else ends
        return found

    # --- runs -------------------------------------------------------------------------------

    def _find(self, key: Hashable) -> _Run | None:
        return self._shards[hash(key) & _SHARD_MASK].get(key)

    def _make(self, keys: list[Hashable], start: int) -> _Run:
        """Return a run of blocks that nobody holds, as long as it gets."""
        shards = self._shards
        run = _Run([], 0)
        part = keys[start : start + _RUN_MAX]
        if len(set(part)) < len(part):  # nonsense: a prompt that names a block twice
            part = part[:1]
        count = 0
        for key in part:
            if shards[hash(key) & _SHARD_MASK].setdefault(key, run) is not run:
                break
            count += 1
        run.keys = part[:count]
        return run

    def _cut(self, run: _Run, keys: list[Hashable], start: int) -> _Run:
        """Return a run that begins with `keys[start]` and is part of `keys`, cut out of `run`."""
        own = run.keys
        first = 0 if own[0] == keys[start] else own.index(keys[start])
        if first:
            run = self._split(run, first)
            own = run.keys
        part = keys[start : start + len(own)]
        if part != own:
            same = next(
                (
                    n
                    for n, (mine, other) in enumerate(zip(own, part, strict=False))
                    if mine != other
                ),
                len(part),
            )
            self._split(run, same)
        return run

    def _split(self, run: _Run, at: int) -> _Run:
        """Take `run.keys[at:]` off into a run of their own, and return that."""
        tail = _Run(run.keys[at:], run.holders)
        del run.keys[at:]
        shards = self._shards
        for key in tail.keys:
            shards[hash(key) & _SHARD_MASK][key] = tail
        for held in self._holding(run.holders):
            number = held.uses[tail] = held.uses[run]
            runs = held.by_age[number].runs
            runs.insert(runs.index(run) + 1, tail)
        return tail

    def _join(self, held: _Held, use: _Use) -> None:
        """Put runs of a use together that nobody else holds, as far as they stay short enough."""
        runs = use.runs
        kept = runs[:1]
        shards = self._shards
        for run in runs[1:]:
            last = kept[-1]
            is_alone = run.holders == last.holders == held.bit
            if is_alone and len(last.keys) + len(run.keys) <= _RUN_MAX:
                for key in run.keys:
                    shards[hash(key) & _SHARD_MASK][key] = last
                last.keys += run.keys
                del held.uses[run]
            else:
                kept.append(run)
        use.runs = kept

    # --- what a replica holds ---------------------------------------------------------------

    def _begin(self, held: _Held, at: float) -> _Use:
        self._numbers += 1
        use = held.by_age[self._numbers] = _Use(at)
        return use

    def _use(self, held: _Held, run: _Run, use: _Use) -> None:
        """Make a run part of the use that was begun last."""
        if run.holders & held.bit:
            if held.uses[run] == self._numbers:
                return  # a prompt that names a block twice
            held.unuse(run)
        else:
            run.holders |= held.bit
            held.blocks += len(run.keys)
        held.uses[run] = self._numbers
        use.runs.append(run)

    def _shrink(self, held: _Held) -> None:
        """Evict the least recently used blocks beyond what the replica has room for."""
        excess = held.blocks - held.room
        while excess > 0:
            use = held.by_age[next(iter(held.by_age))]
            run = use.runs[-1]
            size = len(run.keys)
            self._trim(held, run, max(0, size - excess))
            excess -= size

    def _lose(self, held: _Held, run: _Run) -> None:
        """Note that a replica does not hold a run any more."""
        held.unuse(run)
        held.blocks -= len(run.keys)
        run.holders ^= held.bit
        if not run.holders:
            self._forget(run.keys)

    def _trim(self, held: _Held, run: _Run, at: int) -> None:
        """Note that a replica does not hold `run.keys[at:]` any more."""
        if not at:
            self._lose(held, run)
        elif run.holders != held.bit:
            self._lose(held, self._split(run, at))
        else:
            held.blocks -= len(run.keys) - at
            self._forget(run.keys[at:])
            del run.keys[at:]

    def _forget(self, keys: list[Hashable]) -> None:
        """Delete blocks that nobody holds."""
        shards = self._shards
        for key in keys:
            del shards[hash(key) & _SHARD_MASK][key]

    def _lose_some(self, held: _Held, run: _Run, gone: set[Hashable]) -> None:
        """Note that a replica does not hold some blocks of a run any more."""
        keys = run.keys
        stop = len(keys)
        while stop:
            is_gone = keys[stop - 1] in gone
            start = stop - 1
            while start and (keys[start - 1] in gone) is is_gone:
                start -= 1
            if is_gone:
                self._trim(held, run, start)
            elif start:
                self._split(run, start)
            stop = start

    def _clear(self, held: _Held) -> None:
        for run in list(held.uses):
            self._lose(held, run)

    def _holding(self, holders: int) -> Iterable[_Held]:
        slots = self._slots
        while holders:
            bit = holders & -holders
            held = slots[bit.bit_length() - 1]
            assert held is not None, "a run is held by somebody who was dropped"
            yield held
            holders ^= bit

    def _name(self, holders: int) -> tuple[str, ...]:
        if len(self._names) >= _NAMES_KEPT:
            self._names.clear()
        names = tuple(held.replica_id for held in self._holding(holders))
        self._names[holders] = names
        return names

    def check(self) -> None:
        """Assert that all directions say the same and that nothing is over its bound."""
        runs: dict[_Run, None] = {}
        for shard in self._shards:
            runs.update(dict.fromkeys(shard.values()))
        keys = [key for run in runs for key in run.keys]
        assert len(keys) == len(set(keys)) == sum(map(len, self._shards))
        for run in runs:
            assert run.holders
            assert all(self._find(key) is run for key in run.keys)
        for held in self._held.values():
            assert self._slots[held.slot] is held
            mine = [run for run in runs if run.holders & held.bit]
            assert held.uses.keys() == set(mine)
            assert held.blocks == sum(len(run.keys) for run in mine) <= held.room
            assert list(held.by_age) == sorted(held.by_age)
            used = {run: number for number, use in held.by_age.items() for run in use.runs}
            assert used == held.uses
            assert all(use.runs for use in held.by_age.values())


def _stretch(own: list[Hashable], keys: list[Hashable], start: int, step: int) -> int:
    """Return for how many keys, from `start` on, they go through `own` by steps of 1 or -1."""
    at = len(own) - 1 if own[-1] == keys[start] else own.index(keys[start])
    count = 1
    limit = min(len(keys) - start, len(own) - at if step > 0 else at + 1)
    while count < limit and keys[start + count] == own[at + step * count]:
        count += 1
    return count
