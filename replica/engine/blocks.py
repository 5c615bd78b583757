"""The pool of KV blocks: reference counts, and the prefix cache over them.

A block is *free*, *idle* (nobody holds it, but its content can be found by its hash) or *held* by
one or more sequences; never two of these. Full blocks are never written again, so that holders can
share them. Only numbers live here; the values are the driver's.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """`count` blocks, numbered from 0."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.evictions = 0
        self._free = deque(range(count))
        self._holders = [0] * count
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._events: dict[bytes, bool] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.count - self.available

    def take(self) -> int | None:
        """Return a block for one holder, evicting the oldest idle one if need be; None: all held.

        Its old content is lost.
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

    def find(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return (leading hashes that are cached, how many of their blocks are idle)."""
        idle = 0
        for index, key in enumerate(hashes):
            block = self._block_of.get(key)
            if block is None:
                return index, idle
            idle += block in self._idle
        return len(hashes), idle

    def share(self, key: bytes) -> int:
        """Return the cached block of a hash, with one more holder; it must be cached."""
        block = self._block_of[key]
        self._idle.pop(block, None)
        self._holders[block] += 1
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Make a full block findable by its hash.

        When another block has the same content already, that one stays the findable one.
        """
        assert self._holders[block] > 0, block
        if key not in self._block_of:
            assert block not in self._hash_of, block
            self._block_of[key] = block
            self._hash_of[block] = key
            self._events[key] = True

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one hold on each block.

        Blocks of a chain are given first to last; they become idle last to first, because the head
        of a chain is worth more than its tail, and is useless to evict while the tail stays.
        """
        for block in reversed(list(blocks)):
            left = self._holders[block] - 1
            assert left >= 0, block
            self._holders[block] = left
            if left == 0:
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def drain_events(self) -> dict[bytes, bool]:
        """Return what changed since the last call: hash -> whether it is cached now."""
        events, self._events = self._events, {}
        return events

    def cached(self) -> list[bytes]:
        """Return the hashes of all findable blocks."""
        return list(self._block_of)

    def check(self) -> None:
        """Assert that every block is in exactly one state; for tests."""
        free, idle = set(self._free), set(self._idle)
        held = {block for block, holders in enumerate(self._holders) if holders}
        assert len(free) == len(self._free)
        assert not free & idle
        assert not free & held
        assert not idle & held
        assert len(free) + len(idle) + len(held) == self.count
        assert {block: key for key, block in self._block_of.items()} == self._hash_of
        assert idle <= self._hash_of.keys()
        assert not free & self._hash_of.keys()
