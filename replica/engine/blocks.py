"""Manages the pool of KV blocks, with their reference counts and the prefix cache.

A block is in exactly one of four states. A *free* block has no content. An *idle* block is used by
no sequence, but its content can be found by its hash. A *kept* block is idle and pinned, so it must
not be evicted. A *held* block is used by one or more sequences. Full blocks are never written
again, so several sequences can share them. The pool has only block numbers. The driver has the KV
values.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import cast

# Largest share of the pool that may be pinned. Running sequences need the remaining blocks.
PINNED_RATIO_MAX = 0.5
PIN_S = 3600.0  # seconds that a pin lasts after the last use of the block


class BlockPool:
    """A pool of `count` blocks, numbered from 0."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.evictions = 0
        self._free = deque(range(count))
        self._holders = [0] * count
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # idle blocks, the longest unused first
        self._kept: set[int] = set()
        # block -> expiry of its pin, for kept and held blocks
        self._pinned_until_s: dict[int, float] = {}
        self._first_expiry_s = inf
        self._events: dict[bytes, bool] = {}

    def resize(self, count: int) -> None:
        """Replace the pool by `count` free blocks. No block may be held."""
        assert not any(self._holders), "blocks are held"
        for key in self._block_of:
            self._events[key] = False
        self.count = count
        self._free = deque(range(count))
        self._holders = [0] * count
        self._block_of, self._hash_of = {}, {}
        self._idle.clear()
        self._kept.clear()
        self._pinned_until_s, self._first_expiry_s = {}, inf

    @property
    def available(self) -> int:
        """Number of free and idle blocks, which `take` can return."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks that sequences hold."""
        return self.count - self.available - len(self._kept)

    @property
    def pinned(self) -> int:
        """Number of pinned blocks, both kept and held ones."""
        return len(self._pinned_until_s)

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
            block, _ = self._idle.popitem(last=False)
            key = self._hash_of.pop(block)
            del self._block_of[key]
            self._events[key] = False
            self.evictions += 1
        else:
            return None
        self._holders[block] = 1
        return block

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the first hashes, up to the first hash without a block."""
        blocks = list(map(self._block_of.get, hashes))
        if None in blocks:
            del blocks[blocks.index(None) :]
        return cast("list[int]", blocks)

    def idle_in(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks are idle."""
        return sum(map(self._idle.__contains__, blocks))

    def share(self, key: bytes) -> int:
        """Count one more sequence for the cached block with this hash, and return the block."""
        block = self._block_of[key]
        if self._holders[block] == 0:
            self._idle.pop(block, None)
            self._kept.discard(block)
        self._holders[block] += 1
        return block

    def share_all(self, blocks: Sequence[int]) -> None:
        """Count one more sequence for each of the blocks that `find` has returned.

        A long cached prompt has thousands of blocks, whose calls of `share` would take longer.
        """
        holders, idle = self._holders, self._idle
        if self._kept:
            self._kept.difference_update(blocks)
        for block in blocks:
            if not holders[block]:
                idle.pop(block, None)
            holders[block] += 1

    def hold(self, blocks: Iterable[int]) -> None:
        """Count one more sequence for each block. Every block must be held already."""
        for block in blocks:
            assert self._holders[block] > 0, block
            self._holders[block] += 1

    def publish(self, block: int, key: bytes) -> None:
        """Enter a full block into the cache under its hash.

        If the cache already has a block with this hash, that block stays and this one is not added.
        """
        assert self._holders[block] > 0, block
        if key not in self._block_of:
            assert block not in self._hash_of, block
            self._block_of[key] = block
            self._hash_of[block] = key
            self._events[key] = True

    def release(self, blocks: Iterable[int]) -> None:
        """Count one sequence less for each block.

        The caller lists the blocks of a chain from first to last. They become idle from last to
        first, so the end of a chain is evicted before its beginning. The beginning serves more
        prompts, and the end is useless without the beginning.
        """
        for block in reversed(list(blocks)):
            left = self._holders[block] - 1
            assert left >= 0, block
            self._holders[block] = left
            if left == 0:
                if block in self._pinned_until_s:
                    self._kept.add(block)
                elif block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def pin(self, hashes: Sequence[bytes], until_s: float, now_s: float) -> int:
        """Protect cached blocks from eviction until `until_s`, which replaces an earlier expiry.

        Returns:
            Number of blocks, counted from the first, that are now cached and pinned. It is 0 if
            `until_s` has passed, and below the number of hashes if PINNED_RATIO_MAX is reached.
        """
        self.expire_pins(now_s)
        blocks = self.find(hashes)
        if until_s <= now_s:
            self._unpin([b for b in dict.fromkeys(blocks) if b in self._pinned_until_s])
            return 0
        pinned_max = int(self.count * PINNED_RATIO_MAX)
        for index, block in enumerate(blocks):
            if block not in self._pinned_until_s and self.pinned >= pinned_max:
                return index
            self._pinned_until_s[block] = until_s
            self._first_expiry_s = min(self._first_expiry_s, until_s)
            if block in self._idle:
                del self._idle[block]
                self._kept.add(block)
        return len(blocks)

    def expire_pins(self, now_s: float) -> None:
        """Remove the pins that have expired."""
        if now_s >= self._first_expiry_s:
            pins = self._pinned_until_s
            self._unpin([block for block, until_s in pins.items() if until_s <= now_s])
            self._first_expiry_s = min(pins.values(), default=inf)

    def drop_pins(self) -> None:
        """Remove the pins of all kept blocks, because no sequence could run otherwise."""
        self._unpin(sorted(self._kept))

    def _unpin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            del self._pinned_until_s[block]
            if block in self._kept:
                self._kept.remove(block)
                self._idle[block] = None

    def drain_events(self) -> dict[bytes, bool]:
        """Return the changes since the last call, as hash -> whether its block is cached now."""
        events, self._events = self._events, {}
        return events

    def has(self, key: bytes) -> bool:
        """Whether the block with this hash is cached."""
        return key in self._block_of

    def cached(self) -> list[bytes]:
        """Return the hashes of all cached blocks."""
        return list(self._block_of)

    def check(self) -> None:
        """Assert that every block is in exactly one state. Only tests use this."""
        held = {block for block, holders in enumerate(self._holders) if holders}
        free, idle, kept = set(self._free), set(self._idle), self._kept
        states = [*self._free, *idle, *kept, *held]
        assert sorted(states) == list(range(self.count))
        assert {block: key for key, block in self._block_of.items()} == self._hash_of
        assert idle <= self._hash_of.keys()
        assert kept <= self._pinned_until_s.keys() <= self._hash_of.keys()
        assert not idle & self._pinned_until_s.keys()
        assert not free & self._hash_of.keys()
