"""The index of the KV blocks that each replica of a cell has cached, which placement reads.

The index is updated by dispatches and by reports of engines. Because block hashes form chains, the
index stores *runs* by their first block. A run consists of consecutive blocks of a chain that the
same replicas have cached. So the cost of a prompt's lookup grows with its runs, not with its
blocks. The index may be wrong. Then the placement is worse, and the engine computes the missing
blocks.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import overload

from router.core.fleet.block_runs import (
    BlockRun,
    HeldBlocks,
    Use,
    agreement,
    distinct,
    overlap,
    stretch,
)
from sluice.hashing import HASH_BYTES

# Seconds after a dispatch in which a reported removal of the dispatch's blocks is ignored. Either
# the report is older than the dispatch, or the engine computes the block again for the dispatch.
REMOVAL_GUARD_S = 5.0
_RUN_MAX = 256  # most blocks per run, which bounds the cost of splitting a run
_NAMES_KEPT = 4096
_SHARDS = 16  # parts of a dictionary, because the growth of one large dictionary blocks the router
_LONG_AGO = float("-inf")


class BlockHashes(Sequence[int]):
    """The block hashes of a prompt or of a report, read from the bytes of the message.

    Only the first eight bytes of each hash are used as a key. With ten million blocks, one index in
    370,000 has a collision, which spoils a prediction but no answer. These keys need less memory
    than whole hashes, and need no conversion.

    Attributes:
        view: View of the bytes as integers, which avoids a Python call per hash.
    """

    __slots__ = ("view",)

    def __init__(self, data: bytes) -> None:
        """Create a view of concatenated hashes.

        Raises:
            ValueError: The last hash is incomplete.
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


class PrefixIndex:
    """The cached blocks of a cell's replicas. Calls for unknown replicas have no effect.

    Attributes:
        evicted: Total number of evicted blocks, over all replicas.
    """

    def __init__(self) -> None:
        self.evicted = 0
        self._heads: dict[Hashable, BlockRun] = {}  # runs by their first block
        # Bits of the replicas that have cached a block in a loose run, by block. The continuation
        # of a prompt may begin in the middle of a loose run.
        self._loose: list[dict[Hashable, int]] = [{} for _ in range(_SHARDS)]
        self._held: dict[str, HeldBlocks] = {}
        self._numbered: list[HeldBlocks | None] = []
        self._numbers = 0  # number of the latest `Use`
        self._names: dict[int, tuple[str, ...]] = {}  # ids of replicas by their bits, as a cache

    def __len__(self) -> int:
        """Return the number of pairs of a replica and a block cached on it."""
        return sum(len(held.where) for held in self._held.values())

    def add_replica(self, replica_id: str, kv_blocks: int) -> None:
        """Add a replica without blocks, in place of its earlier record."""
        self.drop_replica(replica_id)
        if None not in self._numbered:
            self._numbered.append(None)
        number = self._numbered.index(None)
        self._numbered[number] = self._held[replica_id] = HeldBlocks(replica_id, number, kv_blocks)
        self._names.clear()

    def drop_replica(self, replica_id: str) -> None:
        """Remove a replica and its blocks."""
        held = self._held.pop(replica_id, None)
        if held is not None:
            self._clear(held)
            self._numbered[held.number] = None
            self._names.clear()

    def reset(self, replica_id: str) -> None:
        """Remove all blocks of a replica whose engine is about to report its whole cache."""
        held = self._held.get(replica_id)
        if held is not None:
            self._clear(held)
            held.has_events = True

    def dispatched(self, replica_id: str, hashes: Sequence[Hashable], now: float) -> None:
        """Record that a prompt was sent to a replica, which will have all its blocks cached."""
        held = self._held.get(replica_id)
        if held is None or not len(hashes):
            return
        use = self._begin(held, now)
        known = self._use_known(held, hashes, use)
        self._cover(held, distinct(hashes[known:]), use, is_report=False)
        self._join(held, use)
        self._shrink(held)

    def stored(self, replica_id: str, hashes: Sequence[Hashable], now: float) -> None:
        """Record an engine's report of cached blocks, which may be a few seconds old."""
        del now  # the age of the report is unknown, so `now` is no time of use
        held = self._held.get(replica_id)
        if held is None:
            return
        held.has_events = True
        use = self._begin(held, _LONG_AGO)
        where = held.where
        keys = distinct(hashes)
        start = 0
        while start < len(keys):
            run = where.get(keys[start])
            if run is not None:
                start += stretch(run.keys, keys, start, 1)
                continue
            stop = start + 1
            while stop < len(keys) and keys[stop] not in where:
                stop += 1
            self._cover(held, keys[start:stop], use, is_report=True)
            start = stop
        if not use.runs:
            del held.by_age[use.number]
        self._shrink(held)

    def removed(self, replica_id: str, hashes: Sequence[Hashable], now: float) -> None:
        """Record an engine's report of evicted blocks, except blocks of recent dispatches."""
        held = self._held.get(replica_id)
        if held is None:
            return
        held.has_events = True
        newest = now - REMOVAL_GUARD_S
        gone: dict[BlockRun, set[Hashable]] = {}
        keys = list(hashes)
        start = 0
        while start < len(keys):
            run = held.where.get(keys[start])
            count = 1
            if run is not None:
                count = stretch(run.keys, keys, start, -1)  # engines evict the tails first
                if held.uses[run].at <= newest:
                    gone.setdefault(run, set()).update(keys[start : start + count])
            start += count
        for run, lost in gone.items():
            self._lose_some(held, run, lost)

    def matches(self, hashes: Sequence[Hashable]) -> dict[str, int]:
        """Return the number of leading blocks of a prompt that each replica has cached.

        Replicas without any of the blocks are omitted.
        """
        if isinstance(hashes, BlockHashes):
            hashes = hashes.view
        size = len(hashes)
        heads = self._heads
        found: dict[str, int] = {}
        left = -1  # bits of the replicas that have cached all blocks so far
        count = 0
        while count < size:
            key = hashes[count]
            run = heads.get(key)
            holders = 0 if run is None else run.holders
            loose = self._loose[hash(key) % _SHARDS].get(key, 0) & left & ~holders
            if loose:
                run = self._find_loose(key, loose)
                holders = run.holders
            ending = left & ~holders
            if ending:
                if count:
                    ends = dict.fromkeys(self._names.get(ending) or self._name(ending), count)
                    found = found | ends if found else ends
                left &= holders
            if run is None or not left:
                return found
            count += overlap(run, hashes, count)
        if left > 0:
            found.update(dict.fromkeys(self._names.get(left) or self._name(left), count))
        return found

    # --- runs -------------------------------------------------------------------------------

    def _cover(self, held: HeldBlocks, keys: list[Hashable], use: Use, *, is_report: bool) -> None:
        """Record that a replica has cached a chain of blocks, with `use` as their last use."""
        start = 0
        while start < len(keys):
            run = self._heads.get(keys[start])
            if run is None:
                run = self._make(keys[start : start + _RUN_MAX], is_loose=is_report)
                if is_report:
                    self._mark(held, run.keys)
            else:
                same = agreement(run.keys, keys, start)
                if same < len(run.keys):
                    self._split(run, same)
            if not run.holders & held.bit:
                self._give(held, run)
            held.use(run, use)
            start += len(run.keys)

    def _use_known(self, held: HeldBlocks, hashes: Sequence[Hashable], use: Use) -> int:
        """Record the use of the first runs of a prompt, and return the number of their blocks.

        As the runs of dispatches are chains, only the first and last block of a run is compared.
        """
        count = 0
        while count < len(hashes):
            run = self._heads.get(hashes[count])
            if run is None or run.is_loose or not run.holders & held.bit:
                break
            end = count + len(run.keys)
            if end > len(hashes) or hashes[end - 1] != run.keys[-1]:
                break
            held.use(run, use)
            count = end
        return count

    def _make(self, keys: list[Hashable], *, is_loose: bool) -> BlockRun:
        """Return a new run without holders, to which the caller must add a holder."""
        run = self._heads[keys[0]] = BlockRun(keys, 0, is_loose=is_loose)
        return run

    def _split(self, run: BlockRun, at: int) -> BlockRun:
        """Split a run by moving `run.keys[at:]` into a new run, and return the new run."""
        tail = BlockRun(run.keys[at:], run.holders, is_loose=run.is_loose)
        del run.keys[at:]
        for held in self._holding(run.holders):
            use = held.uses[tail] = held.uses[run]
            use.runs.insert(use.runs.index(run) + 1, tail)
            held.point(tail.keys, tail)
        twin = self._heads.setdefault(tail.keys[0], tail)
        return tail if twin is tail else self._unite(twin, tail)

    def _unite(self, run: BlockRun, twin: BlockRun) -> BlockRun:
        """Merge the common prefix of two runs with the same first block, and return the result.

        The rest behind the common prefix is split off. Two runs have the same first block if blocks
        are reported separately from the blocks that precede them.
        """
        same = agreement(run.keys, twin.keys, 0)
        if same < len(run.keys):
            self._split(run, same)
        if same < len(twin.keys):
            self._split(twin, same)
        for held in self._holding(twin.holders):
            use = held.uses.pop(twin)
            use.runs[use.runs.index(twin)] = run
            held.uses[run] = use
            held.point(run.keys, run)
        run.holders |= twin.holders
        run.is_loose |= twin.is_loose
        return run

    def _find_loose(self, key: Hashable, holders: int) -> BlockRun:
        """Split loose runs so that the block `key` begins a run, and return that run."""
        for held in self._holding(holders):
            run = held.where[key]
            at = run.keys.index(key)
            if at:
                self._split(run, at)
        return self._heads[key]

    def _mark(self, held: HeldBlocks, keys: list[Hashable]) -> None:
        bit = held.bit
        for key in keys:
            shard = self._loose[hash(key) % _SHARDS]
            shard[key] = shard.get(key, 0) | bit

    def _forget(self, held: HeldBlocks, run: BlockRun, keys: list[Hashable]) -> None:
        """Record that a replica has evicted some blocks of a run."""
        self.evicted += len(keys)
        held.forget(keys)
        if run.is_loose:
            bit = held.bit
            for key in keys:
                shard = self._loose[hash(key) % _SHARDS]
                others = shard.pop(key, 0) & ~bit
                if others:
                    shard[key] = others

    def _join(self, held: HeldBlocks, use: Use) -> None:
        """Join consecutive runs of `use` that no other replica has, up to `_RUN_MAX` blocks."""
        runs = use.runs
        kept = runs[:1]
        for run in runs[1:]:
            last = kept[-1]
            is_alone = run.holders == last.holders == held.bit
            if is_alone and len(last.keys) + len(run.keys) <= _RUN_MAX:
                del self._heads[run.keys[0]], held.uses[run]
                held.point(run.keys, last)
                last.keys += run.keys
                last.is_loose |= run.is_loose
            else:
                kept.append(run)
        use.runs = kept

    # --- cached blocks of a replica ---------------------------------------------------------

    def _begin(self, held: HeldBlocks, at: float) -> Use:
        self._numbers += 1
        use = held.by_age[self._numbers] = Use(self._numbers, at)
        return use

    def _give(self, held: HeldBlocks, run: BlockRun) -> None:
        """Add a replica to a run's holders, and remove these blocks from its other runs."""
        where = held.where
        if not where.keys().isdisjoint(run.keys):
            keys = set(run.keys)
            for twin in dict.fromkeys(where[key] for key in run.keys if key in where):
                self._lose_some(held, twin, keys)
        held.point(run.keys, run)
        run.holders |= held.bit

    def _shrink(self, held: HeldBlocks) -> None:
        """Evict the least recently used blocks until the rest fits on the replica."""
        excess = len(held.where) - held.room
        while excess > 0:
            use = held.by_age[next(iter(held.by_age))]
            run = use.runs[-1]
            self._trim(held, run, max(0, len(run.keys) - excess))
            excess = len(held.where) - held.room

    def _trim(self, held: HeldBlocks, run: BlockRun, at: int) -> None:
        """Record that a replica has evicted `run.keys[at:]`."""
        if not at:
            self._lose(held, run)
        elif run.holders != held.bit:
            self._lose(held, self._split(run, at))
        else:
            self._forget(held, run, run.keys[at:])
            del run.keys[at:]

    def _lose(self, held: HeldBlocks, run: BlockRun) -> None:
        """Record that a replica has evicted a run."""
        held.unuse(run)
        self._forget(held, run, run.keys)
        run.holders ^= held.bit
        if not run.holders:
            del self._heads[run.keys[0]]

    def _lose_some(self, held: HeldBlocks, run: BlockRun, gone: set[Hashable]) -> None:
        """Record that a replica has evicted the given blocks of a run."""
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

    def _clear(self, held: HeldBlocks) -> None:
        for run in list(held.uses):
            self._lose(held, run)

    def _holding(self, holders: int) -> Iterable[HeldBlocks]:
        numbered = self._numbered
        while holders:
            bit = holders & -holders
            held = numbered[bit.bit_length() - 1]
            assert held is not None, "a dropped replica holds a run"
            yield held
            holders ^= bit

    def _name(self, holders: int) -> tuple[str, ...]:
        if len(self._names) >= _NAMES_KEPT:
            self._names.clear()
        names = tuple(held.replica_id for held in self._holding(holders))
        self._names[holders] = names
        return names

    def check(self) -> None:
        """Assert that all dictionaries are consistent, and within their bounds."""
        runs = {run: None for held in self._held.values() for run in held.uses}
        assert {run.keys[0]: run for run in runs} == self._heads
        assert len(runs) == len(self._heads)
        for held in self._held.values():
            assert self._numbered[held.number] is held
            mine = [run for run in runs if run.holders & held.bit]
            assert held.uses.keys() == set(mine)
            assert held.where == {key: run for run in mine for key in run.keys}
            assert len(held.where) == sum(len(run.keys) for run in mine) <= held.room
            assert list(held.by_age) == sorted(held.by_age)
            used = {run: use for use in held.by_age.values() for run in use.runs}
            assert used == held.uses
            assert sum(len(use.runs) for use in held.by_age.values()) == len(used)
            assert all(use.runs and use.number == n for n, use in held.by_age.items())
        for key, holders in (item for shard in self._loose for item in shard.items()):
            assert holders
            assert all(held.where[key].is_loose for held in self._holding(holders))
