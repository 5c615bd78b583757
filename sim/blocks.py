"""The prefix cache of a simulated engine, with its blocks, their users and the order of eviction.

A block is in one of three states. A block in use is pinned by running requests. An idle block is
cached and may be evicted. A reserved block is intended for uncomputed tokens of a running request,
and has no content to share.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockCache:
    """The KV memory of one engine, in blocks, which evicts the least recently used idle block.

    Attributes:
        capacity: Number of blocks of the memory.
        reserved: Number of blocks that are reserved for running requests and not computed yet.
    """

    def __init__(
        self,
        capacity: int,
        *,
        on_stored: Callable[[int], None],
        on_removed: Callable[[int], None],
    ) -> None:
        self.capacity = capacity
        self.reserved = 0
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # idle blocks, the oldest first
        self._on_stored = on_stored
        self._on_removed = on_removed

    @property
    def used(self) -> int:
        """The number of pinned and reserved blocks, which cannot be evicted."""
        return len(self._users) + self.reserved

    @property
    def cached(self) -> Iterable[int]:
        """All blocks that a prompt can reuse."""
        return (*self._users, *self._idle)

    @property
    def is_at_rest(self) -> bool:
        """Whether no request uses or reserves a block."""
        return not self._users and not self.reserved

    def match(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are cached."""
        users, idle = self._users, self._idle
        depth = 0
        for block in blocks:
            if block not in users and block not in idle:
                break
            depth += 1
        return depth

    def has_room(self, matched: Sequence[int], new: int) -> bool:
        """Return whether a request that reuses `matched` and adds `new` blocks fits.

        A request that is larger than the memory runs only while no other request runs.
        """
        used = self.used
        revived = sum(1 for block in matched if block in self._idle)
        return used == 0 or used + revived + new <= self.capacity

    def take(self, matched: Sequence[int], new: int) -> None:
        """Pin cached blocks, and reserve new blocks."""
        for block in matched:
            self._pin(block)
        self.reserved += new
        self._evict()

    def publish(self, computed: Sequence[int]) -> None:
        """Turn a request's reserved blocks into cached blocks, pinned by this request."""
        self.reserved -= len(computed)
        for block in computed:
            if block not in self._users and block not in self._idle:
                self._on_stored(block)
            self._pin(block)

    def release(self, used: Sequence[int], reserved: int) -> None:
        """Release a request's pinned and reserved blocks, of which the last are evicted first."""
        self.reserved -= reserved
        for block in reversed(used):  # a prompt's last blocks are the least likely to be shared
            users = self._users[block] - 1
            if users:
                self._users[block] = users
            else:
                del self._users[block]
                self._idle[block] = None
        self._evict()

    def clear(self) -> None:
        """Drop all blocks, as at the death of the process."""
        for block in self.cached:
            self._on_removed(block)
        self._users.clear()
        self._idle.clear()
        self.reserved = 0

    def _pin(self, block: int) -> None:
        if block in self._idle:
            del self._idle[block]
            self._users[block] = 1
        else:
            self._users[block] = self._users.get(block, 0) + 1

    def _evict(self) -> None:
        while self._idle and self.used + len(self._idle) > self.capacity:
            block, _ = self._idle.popitem(last=False)
            self._on_removed(block)


class SharedPrefixes:
    """One infinite cache that all replicas share at no cost, as the upper bound of any routing.

    Args:
        on_stored: Called with every block that is added for the first time.
    """

    def __init__(self, on_stored: Callable[[int], None]) -> None:
        self._known: set[int] = set()
        self._on_stored = on_stored

    def match(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks were computed before."""
        for depth, block in enumerate(blocks):
            if block not in self._known:
                return depth
        return len(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Add the blocks of a prompt."""
        for block in blocks:
            if block not in self._known:
                self._known.add(block)
                self._on_stored(block)
