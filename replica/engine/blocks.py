"""Manages the pool of KV blocks, with their reference counts and the prefix cache.

A block is in exactly one of four states. A *free* block has no content. An *idle* block is used by
no sequence, but its content can be found by its hash. A *kept* block is idle and pinned, so it must
not be evicted. A *held* block is used by one or more sequences. Full blocks are never written
again, so several sequences can share them. The pool has only block numbers. The driver has the KV
values.

Cached blocks are found, counted and released in *runs*, so the cost of a cached prompt grows with
its runs, not with its blocks. A turn of a conversation makes the run of the turns before longer. A
run is split where another prompt diverges.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from math import inf
from typing import Any

# Largest share of the pool that may be pinned. Running sequences need the remaining blocks.
PINNED_RATIO_MAX = 0.5
PIN_S = 3600.0  # seconds that a pin lasts after the last use of the block


class CachedRun:
    """Cached blocks in the same state, which follow one another in a chain.

    A sequence that holds one of the blocks holds all of them.

    Attributes:
        blocks: Numbers of the blocks, from first to last, at least one.
        keys: Hash of each block.
        holders: Number of sequences that hold the blocks.
    """

    __slots__ = ("blocks", "holders", "keys")

    def __init__(self, blocks: list[int], keys: list[bytes], holders: int) -> None:
        self.blocks = blocks
        self.keys = keys
        self.holders = holders


class BlockPool:
    """A pool of `count` blocks, numbered from 0.

    Attributes:
        evictions: Total number of evicted blocks.
        pinned: Number of pinned blocks, both kept and held ones.
    """

    def __init__(self, count: int) -> None:
        self.evictions = 0
        self._events: dict[bytes, bool] = {}
        self._empty(count)

    def _empty(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))
        self._holders = [0] * count  # of each block outside of runs
        self._block_of: dict[bytes, int] = {}
        self._run_of: list[CachedRun | None] = [None] * count
        self._idle: OrderedDict[CachedRun, None] = OrderedDict()  # the longest unused run first
        self._idle_blocks = self._kept_blocks = self.pinned = 0
        # Run -> expiry of its pin. A pinned run without holders is kept.
        self._pinned_until_s: dict[CachedRun, float] = {}
        self._first_expiry_s = inf

    def resize(self, count: int) -> None:
        """Replace the pool by `count` free blocks. No block may be held."""
        assert not self.used, "blocks are held"
        for key in self._block_of:
            self._events[key] = False
        self._empty(count)

    @property
    def available(self) -> int:
        """Number of free and idle blocks, which `take` can return."""
        return len(self._free) + self._idle_blocks

    @property
    def used(self) -> int:
        """Number of blocks that sequences hold."""
        return self.count - self.available - self._kept_blocks

    @property
    def has_events(self) -> bool:
        """Whether `drain_events` would return any change."""
        return bool(self._events)

    def take(self) -> int | None:
        """Return a block for one sequence. If no block is free, evict the longest unused idle one.

        The result is None if all blocks are held or pinned.

        The previous content of the block is lost.
        """
        if self._free:
            block = self._free.popleft()
        elif self._idle:
            run = next(iter(self._idle))
            block = run.blocks.pop()
            key = run.keys.pop()
            if not run.blocks:
                del self._idle[run]
            self._idle_blocks -= 1
            self._run_of[block] = None
            del self._block_of[key]
            self._events[key] = False
            self.evictions += 1
        else:
            return None
        self._holders[block] = 1
        return block

    def find(self, hashes: list[bytes]) -> list[int]:
        """Return the cached blocks of the first hashes, up to the first hash without a block."""
        found: list[int] = []
        while len(found) < len(hashes):
            block = self._block_of.get(hashes[len(found)])
            if block is None:
                break
            run = self._run_of[block]
            assert run is not None, block
            first = run.blocks.index(block)
            found += run.blocks[first : first + _agreement(run.keys, first, hashes, len(found))]
        return found

    def find_each(self, hashes: Sequence[bytes]) -> dict[bytes, int]:
        """Return the blocks of all hashes that are cached."""
        return {key: self._block_of[key] for key in hashes if key in self._block_of}

    def idle_in(self, blocks: list[int]) -> int:
        """Return how many of the cached blocks are idle."""
        idle = start = 0
        while start < len(blocks):
            run = self._run_of[blocks[start]]
            assert run is not None, blocks[start]
            count = _agreement(run.blocks, run.blocks.index(blocks[start]), blocks, start)
            if run in self._idle:
                idle += count
            start += count
        return idle

    def share(self, blocks: list[int]) -> None:
        """Count one more sequence for each block. The blocks are cached or held.

        If the beginning of a run is not among the blocks, it counts as used now.
        """
        start = 0
        while start < len(blocks):
            run = self._run_of[blocks[start]]
            if run is None:
                assert self._holders[blocks[start]] > 0, blocks[start]
                self._holders[blocks[start]] += 1
                start += 1
                continue
            run = self._cut(run, blocks, start)
            if not run.holders:
                self._remove_unused(run)
            run.holders += 1
            start += len(run.blocks)

    def publish(self, blocks: list[int], keys: list[bytes], first: int, stop: int) -> None:
        """Enter full blocks of a sequence into the cache under their hashes.

        If the cache already has a block with one of the hashes, that block stays, and the block of
        the sequence is not added.

        Args:
            blocks: Blocks of the sequence.
            keys: Hashes of its blocks, at least `stop`.
            first: Index of the first block to add. All added blocks have the same holders.
            stop: Index after the last block to add.
        """
        run_of, block_of, events = self._run_of, self._block_of, self._events
        run = run_of[blocks[first - 1]] if first else None
        # The run before is longer from now on, if this sequence alone holds all its blocks.
        if run is not None and (run.holders > 1 or run in self._pinned_until_s):
            run = None
        for index in range(first, stop):
            block, key = blocks[index], keys[index]
            assert run_of[block] is None, block
            if key in block_of:
                run = None
                continue
            holders = self._holders[block]
            if run is None or run.holders != holders:
                assert holders > 0, block
                run = CachedRun([], [], holders)
            run.blocks.append(block)
            run.keys.append(key)
            run_of[block] = run
            block_of[key] = block
            events[key] = True

    def release(self, blocks: list[int]) -> None:
        """Count one sequence less for each block.

        The caller lists the blocks of a chain from first to last. They become idle from last to
        first, so the end of a chain is evicted before its beginning. The beginning serves more
        prompts, and the end is useless without the beginning.
        """
        stop = len(blocks)
        while stop:
            block = blocks[stop - 1]
            run = self._run_of[block]
            if run is None:
                stop -= 1
                self._holders[block] -= 1
                assert self._holders[block] >= 0, block
                if not self._holders[block]:
                    self._free.append(block)
                continue
            stop -= len(run.blocks)
            run.holders -= 1
            assert run.holders >= 0, block
            assert run.blocks[0] == blocks[stop], "a sequence holds whole runs"
            if not run.holders:
                self._add_unused(run)

    def pin(self, hashes: list[bytes], until_s: float, now_s: float) -> int:
        """Protect cached blocks from eviction until `until_s`, which replaces an earlier expiry.

        Returns:
            Number of blocks, counted from the first, that are now cached and pinned. It is 0 if
            `until_s` has passed, and below the number of hashes if PINNED_RATIO_MAX is reached.
        """
        self.expire_pins(now_s)
        blocks = self.find(hashes)
        pinned = 0
        while pinned < len(blocks):
            run = self._run_of[blocks[pinned]]
            assert run is not None, blocks[pinned]
            run = self._cut(run, blocks, pinned)
            pinned += len(run.blocks)
            if until_s <= now_s:
                self._unpin([run])
                continue
            excess = self.pinned + len(run.blocks) - int(self.count * PINNED_RATIO_MAX)
            if run not in self._pinned_until_s and excess > 0:
                pinned -= excess
                if excess >= len(run.blocks):
                    break
                run = self._split(run, len(run.blocks) - excess)
            self._pin(run, until_s)
        return pinned if until_s > now_s else 0

    def expire_pins(self, now_s: float) -> None:
        """Remove the pins that have expired."""
        if now_s >= self._first_expiry_s:
            pins = self._pinned_until_s
            self._unpin([run for run, until_s in pins.items() if until_s <= now_s])
            self._first_expiry_s = min(pins.values(), default=inf)

    def drop_pins(self) -> None:
        """Remove the pins of all kept blocks, because no sequence could run otherwise."""
        self._unpin([run for run in self._pinned_until_s if not run.holders])

    def _pin(self, run: CachedRun, until_s: float) -> None:
        if not run.holders:
            self._remove_unused(run)
        if run not in self._pinned_until_s:
            self.pinned += len(run.blocks)
        self._pinned_until_s[run] = until_s
        if not run.holders:
            self._add_unused(run)
        self._first_expiry_s = min(self._first_expiry_s, until_s)

    def _unpin(self, runs: list[CachedRun]) -> None:
        for run in reversed(runs):  # `pin` begins with the first run of a chain
            if run not in self._pinned_until_s:
                continue
            if not run.holders:
                self._remove_unused(run)
            del self._pinned_until_s[run]
            self.pinned -= len(run.blocks)
            if not run.holders:
                self._add_unused(run)

    def _add_unused(self, run: CachedRun) -> None:
        """Make a run without holders kept if it is pinned, else idle."""
        if run in self._pinned_until_s:
            self._kept_blocks += len(run.blocks)
        else:
            self._idle[run] = None
            self._idle_blocks += len(run.blocks)

    def _remove_unused(self, run: CachedRun) -> None:
        """Reverse `_add_unused`."""
        if run in self._pinned_until_s:
            self._kept_blocks -= len(run.blocks)
        else:
            del self._idle[run]
            self._idle_blocks -= len(run.blocks)

    def _cut(self, run: CachedRun, blocks: list[int], start: int) -> CachedRun:
        """Split a run so that it has only blocks which follow one another from `start` on."""
        first = run.blocks.index(blocks[start])
        if first:
            self._split(run, first)
        same = _agreement(run.blocks, 0, blocks, start)
        return run if same == len(run.blocks) else self._split(run, same)

    def _split(self, run: CachedRun, at: int) -> CachedRun:
        """Move the first `at` blocks of a run into a new run, and return the new run.

        An idle run keeps its place in the order of evictions. The new run counts as used now.
        """
        head = CachedRun(run.blocks[:at], run.keys[:at], run.holders)
        del run.blocks[:at]
        del run.keys[:at]
        for block in head.blocks:
            self._run_of[block] = head
        if run in self._pinned_until_s:
            self._pinned_until_s[head] = self._pinned_until_s[run]
        elif not run.holders:
            self._idle[head] = None
        return head

    def drain_events(self) -> dict[bytes, bool]:
        """Return the changes since the last call, as hash -> whether its block is cached now."""
        events, self._events = self._events, {}
        return events

    def cached(self) -> list[bytes]:
        """Return the hashes of all cached blocks."""
        return list(self._block_of)

    def check(self) -> None:
        """Assert that every block is in exactly one state. Only tests use this."""
        runs = {run for run in self._run_of if run is not None}
        idle, pinned = set(self._idle), self._pinned_until_s.keys()
        kept = {run for run in pinned if not run.holders}
        assert idle | pinned <= runs
        assert not idle & pinned
        assert idle | kept == {run for run in runs if not run.holders}
        for of_state, count in ((idle, self._idle_blocks), (kept, self._kept_blocks)):
            assert sum(len(run.blocks) for run in of_state) == count
        assert sum(len(run.blocks) for run in pinned) == self.pinned
        in_runs = {block: run for run in runs for block in run.blocks}
        assert sum(len(run.blocks) for run in runs) == len(in_runs)
        assert [in_runs.get(block) for block in range(self.count)] == self._run_of
        pairs = [pair for run in runs for pair in zip(run.keys, run.blocks, strict=True)]
        assert dict(pairs) == self._block_of
        assert len(pairs) == len(self._block_of)
        outside = [b for b in range(self.count) if b not in in_runs and self._holders[b]]
        assert sorted([*self._free, *in_runs, *outside]) == list(range(self.count))


def _agreement(own: list[Any], first: int, others: list[Any], start: int) -> int:
    """Return how many elements of `own[first:]` are equal to those of `others[start:]`."""
    mine = own[first:] if first else own
    part = others[start : start + len(mine)]
    if mine == part:  # compared in C, mostly by identity
        return len(mine)
    count = 0
    while count < len(part) and mine[count] == part[count]:
        count += 1
    return count
