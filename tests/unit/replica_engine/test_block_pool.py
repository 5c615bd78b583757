from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replica.engine.blocks import BlockPool

BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Random users and pins of blocks, compared with a naive model.

    The changes of `drain_events` must add up to the index, and pinned blocks must stay cached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.chains: list[list[int]] = []
        self.told: set[bytes] = set()
        self.content: dict[int, int] = {}  # block -> content that its user wrote
        self.written = 0
        self.now_s = 0.0
        self.pins: dict[bytes, float] = {}

    @initialize(idle=st.integers(0, 4))
    def begin_with_cached_blocks(self, idle: int) -> None:
        for key in range(4):
            self.take()
            self.pool.publish(self.chains[-1][0], bytes([key]) * 16)
        for _ in range(idle):
            self.release(0)

    @rule()
    def take(self) -> None:
        available = self.pool.available
        block = self.pool.take()
        assert (block is None) == (available == 0)
        if block is not None:
            assert all(block not in chain for chain in self.chains)
            self.written += 1
            self.content[block] = self.written
            self.chains.append([block])

    @rule(index=st.integers(0, 20), key=st.integers(0, 4))
    def publish(self, index: int, key: int) -> None:
        if self.chains:
            block = self.chains[index % len(self.chains)][0]
            if block not in self.pool._hash_of:
                self.pool.publish(block, bytes([key]) * 16)

    @rule(index=st.integers(0, 6))
    def share(self, index: int) -> None:
        name = self.some_name(index)
        found = self.pool.find([name])
        assert bool(found) == (name in self.pool.cached())
        if found:
            before, idle = self.pool.available, self.pool.idle_in(found)
            assert self.pool.share(name) == found[0]
            self.chains.append(found)
            assert self.pool.available == before - idle

    @rule(count=st.integers(0, 6))
    def share_all(self, count: int) -> None:
        names = self.pool.cached()[:count]
        found = self.pool.find([*names, b"unknown.........", *names])
        before, idle = self.pool.available, self.pool.idle_in(found)
        self.pool.share_all(found)
        self.chains += [found] if found else []
        assert (len(found), self.pool.available) == (len(names), before - idle)

    def some_name(self, index: int) -> bytes:
        """Return the hash of a cached block, or one that is not cached."""
        return [*self.pool.cached(), b"unknown........."][: index + 1][-1]

    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        if self.chains:
            self.pool.release(self.chains.pop(index % len(self.chains)))

    @rule(indices=st.lists(st.integers(0, 6), min_size=1, max_size=4), ttl_s=st.integers(-1, 9))
    def pin(self, indices: list[int], ttl_s: int) -> None:
        names = [self.some_name(index) for index in indices]
        until_s = self.now_s + ttl_s
        pinned = self.pool.pin(names, until_s, self.now_s)
        self.expire()
        cached = names[: len(self.pool.find(names))]
        if ttl_s > 0:
            self.pins.update(dict.fromkeys(names[:pinned], until_s))
            assert pinned == len(cached) or len(self.pins) == BLOCKS // 2
        else:
            assert pinned == 0
            for name in cached:
                self.pins.pop(name, None)

    @rule(duration_s=st.integers(1, 3))
    def wait(self, duration_s: int) -> None:
        self.now_s += duration_s
        self.pool.expire_pins(self.now_s)
        self.expire()

    def expire(self) -> None:
        self.pins = {name: end_s for name, end_s in self.pins.items() if end_s > self.now_s}

    @rule()
    def drop_pins(self) -> None:
        self.pool.drop_pins()
        held = {self.pool._hash_of.get(block) for chain in self.chains for block in chain}
        self.pins = {name: end_s for name, end_s in self.pins.items() if name in held}

    @rule()
    def drain(self) -> None:
        for key, is_cached in self.pool.drain_events().items():
            if is_cached:
                self.told.add(key)
            else:
                self.told.discard(key)
        assert self.told == set(self.pool.cached())

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        self.pool.check()
        held = {block for chain in self.chains for block in chain}
        assert self.pool.used == len(held)
        assert self.pool.pinned == len(self.pins) <= BLOCKS // 2
        assert self.pins.keys() <= set(self.pool.cached())

    def teardown(self) -> None:
        for chain in self.chains:
            self.pool.release(chain)
        assert self.pool.used == 0
        self.pool.check()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=60)


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    chain = [pool.take() for _ in range(3)]
    assert None not in chain
    blocks = [block for block in chain if block is not None]
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]) * 16)
    pool.release(blocks)
    pool.take()
    found = pool.find([bytes([i]) * 16 for i in range(3)])
    assert (found, pool.idle_in(found)) == (blocks[:2], 2)


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    pool.publish(first, b"x" * 16)
    pool.publish(second, b"x" * 16)
    assert pool.drain_events() == {b"x" * 16: True}
    pool.release([second])
    pool.release([first])
    assert pool.share(b"x" * 16) == first


def test_room_is_not_counted_twice_for_a_pinned_block_that_is_shared() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert block is not None
    pool.publish(block, b"x" * 16)
    pool.release([block])
    assert pool.find([b"x" * 16]) == [block]
    assert pool.idle_in([block]) == 1
    pool.pin([b"x" * 16], 10.0, 0.0)
    assert (pool.available, pool.used) == (1, 0)
    assert pool.find([b"x" * 16]) == [block]
    assert pool.idle_in([block]) == 0
    pool.share(b"x" * 16)
    assert (pool.available, pool.used) == (1, 1)
