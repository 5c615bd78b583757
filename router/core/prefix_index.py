"""Which replica of a cell holds which KV block: what placement knows about prefix caches.

It is told what was dispatched and what engines report, and never iterates over a prompt to answer:
block hashes form chains, and engines evict the tails first, so that whoever holds a block holds all
before it, nearly always. Where that is not so for a moment, an answer is a little wrong and the
engine computes what it lacks.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import overload

from sluice.hashing import HASH_BYTES

# An engine's removal that reaches us so soon after our own dispatch of the block is older than that
# dispatch, or is made good by it: the engine computes the block again.
REMOVAL_GUARD_S = 5.0
# An engine that reports evictions says itself what is gone; until it has, its replica may seem to
# hold this share more. Guessing what it evicts would forget blocks that nobody reports again.
_REPORT_SLACK_RATIO = 0.125
_VICTIMS = 512  # looked up at once: finding the oldest entry passes over all that were moved away

# Time of a dispatch; one object per call, whose identity tells whether anything came after it.
_Touch = tuple[float]
_LONG_AGO = float("-inf")


class BlockHashes(Sequence[int]):
    """The block hashes of a prompt or of an event, read from the bytes they came in.

    Only the first eight bytes of each hash are used: among ten million blocks, one pair in 370,000
    indices is mistaken for another, and what that spoils is a prediction. Such keys need a third
    less memory than the bytes, and cost nothing to make.
    """

    __slots__ = ("_keys",)

    def __init__(self, data: bytes) -> None:
        """Look at concatenated hashes.

        Raises:
            ValueError: The last one is cut off.
        """
        if len(data) % HASH_BYTES:
            raise ValueError(f"{len(data)} bytes of block hashes, not a multiple of {HASH_BYTES}")
        self._keys = memoryview(data).cast("Q")[:: HASH_BYTES // 8]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._keys[index]


class _Held:
    """What one replica holds.

    Attributes:
        slot: Number of its bit.
        blocks: Hash -> its last dispatch; least recently used first.
        room: Blocks of its cache.
        victims: The least recently used ones of some moment, the very first at the end.
    """

    __slots__ = ("bit", "blocks", "has_events", "replica_id", "room", "slot", "victims")

    def __init__(self, replica_id: str, slot: int, kv_blocks: int) -> None:
        self.replica_id = replica_id
        self.slot = slot
        self.bit = 1 << slot
        self.room = kv_blocks
        self.has_events = False
        self.blocks: dict[Hashable, _Touch] = {}
        self.victims: list[tuple[Hashable, _Touch]] = []


class PrefixIndex:
    """The blocks of all replicas of a cell; calls about unknown replicas change nothing."""

    def __init__(self) -> None:
        self._holders: dict[Hashable, int] = {}  # hash -> the bits of its replicas
        self._held: dict[str, _Held] = {}
        self._names: list[str] = []  # by bit
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        """Return how many entries are kept: pairs of a replica and a block."""
        return sum(len(held.blocks) for held in self._held.values())

    def add_replica(self, replica_id: str, kv_blocks: int) -> None:
        """Begin with a replica that holds nothing; one that is known is begun anew."""
        self.drop_replica(replica_id)
        if self._free_slots:
            slot = self._free_slots.pop()
            self._names[slot] = replica_id
        else:
            slot = len(self._names)
            self._names.append(replica_id)
        self._held[replica_id] = _Held(replica_id, slot, kv_blocks)

    def drop_replica(self, replica_id: str) -> None:
        """Forget a replica."""
        held = self._held.pop(replica_id, None)
        if held is not None:
            self._release(held, held.blocks)
            self._free_slots.append(held.slot)

    def reset(self, replica_id: str) -> None:
        """Forget what a replica holds: its engine is about to say everything anew."""
        held = self._held.get(replica_id)
        if held is not None:
            self._release(held, held.blocks)
            held.blocks, held.victims = {}, []
            held.has_events = True

    def dispatched(self, replica_id: str, hashes: Sequence[Hashable], now: float) -> None:
        """Note that a replica will hold all blocks of a prompt, and has just used them."""
        held = self._held.get(replica_id)
        if held is None:
            return
        blocks = held.blocks
        pop = blocks.pop
        touch = (now,)
        fresh: list[Hashable] = []
        for key in reversed(list(hashes)):  # the head becomes the most recently used
            if pop(key, None) is None:
                fresh.append(key)
            blocks[key] = touch
        self._add(held, fresh)

    def stored(self, replica_id: str, hashes: Sequence[Hashable], now: float) -> None:
        """Note what an engine says it has cached, now or a few seconds ago; oldest first."""
        del now  # a dispatch that we know of is no older
        held = self._held.get(replica_id)
        if held is None:
            return
        held.has_events = True
        blocks = held.blocks
        touch = (_LONG_AGO,)  # a removal of it is believed
        fresh = [key for key in hashes if key not in blocks]
        blocks.update(dict.fromkeys(fresh, touch))
        self._add(held, fresh)

    def removed(self, replica_id: str, hashes: Sequence[Hashable], now: float) -> None:
        """Note what an engine says it has evicted, unless that is older than our last dispatch."""
        held = self._held.get(replica_id)
        if held is None:
            return
        held.has_events = True
        blocks = held.blocks
        newest = now - REMOVAL_GUARD_S
        gone: list[Hashable] = []
        for key in hashes:
            touch = blocks.get(key)
            if touch is not None and touch[0] <= newest:
                del blocks[key]
                gone.append(key)
        self._release(held, gone)

    def matches(self, hashes: Sequence[Hashable]) -> dict[str, int]:
        """Return how many leading blocks of a prompt each replica holds; holders only.

        About log2(blocks) lookups for each different set of holders along the prompt.
        """
        size = len(hashes)
        get = self._holders.get
        first = get(hashes[0], 0) if size else 0
        found: dict[str, int] = {}
        names = self._names
        # Of blocks [low, high): who holds the first of them, and who holds the one after the last.
        ranges = [(0, first, size, 0)]
        while ranges:
            low, holders, high, beyond = ranges.pop()
            while holders != beyond and high - low > 1:
                middle = (low + high) >> 1
                there = get(hashes[middle], 0) & holders | beyond
                if there != beyond:
                    ranges.append((middle, there, high, beyond))
                high, beyond = middle, there
            ending = holders & ~beyond
            while ending:
                bit = ending & -ending
                found[names[bit.bit_length() - 1]] = high
                ending ^= bit
        return found

    def _add(self, held: _Held, fresh: Sequence[Hashable]) -> None:
        """Set a replica's bit at blocks that it did not hold, and let it evict what is too much."""
        bit = held.bit
        holders = self._holders
        before = after = 0
        for key in fresh:
            others = holders.get(key, 0)
            if not others:
                holders[key] = bit  # one object for all of them
                continue
            if others != before:
                before, after = others, others | bit
            holders[key] = after
        room = held.room
        if held.has_events:
            room += int(room * _REPORT_SLACK_RATIO)
        excess = len(held.blocks) - room
        if excess > 0:
            self._release(held, _evict(held, excess))

    def _release(self, held: _Held, keys: "Sequence[Hashable] | dict[Hashable, _Touch]") -> None:
        """Clear a replica's bit at blocks that it holds no more."""
        bit = held.bit
        holders = self._holders
        for key in keys:
            others = holders[key] ^ bit
            if others:
                holders[key] = others
            else:
                del holders[key]

    def check(self) -> None:
        """Assert that both directions say the same and that nothing is over its bound."""
        expected: dict[Hashable, int] = {}
        for replica_id, held in self._held.items():
            assert self._names[held.slot] == replica_id
            room = held.room + (int(held.room * _REPORT_SLACK_RATIO) if held.has_events else 0)
            assert len(held.blocks) <= room, (replica_id, len(held.blocks), room)
            for key in held.blocks:
                expected[key] = expected.get(key, 0) | held.bit
        assert expected == self._holders


def _evict(held: _Held, count: int) -> list[Hashable]:
    """Take the `count` least recently used blocks out of a replica's book."""
    blocks = held.blocks
    gone: list[Hashable] = []
    while len(gone) < count:
        if not held.victims:
            held.victims = list(islice(blocks.items(), max(_VICTIMS, count)))[::-1]
        key, touch = held.victims.pop()
        if blocks.get(key) is touch:  # neither used nor removed since
            del blocks[key]
            gone.append(key)
    return gone
