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
            self.take(is_longer=False)
            self.publish(-1, [key])
        for _ in range(idle):
            self.release(0)

    @rule(is_longer=st.booleans())
    def take(self, *, is_longer: bool) -> None:
        available = self.pool.available
        block = self.pool.take()
        assert (block is None) == (available == 0)
        if block is not None:
            assert all(block not in chain for chain in self.chains)
            self.written += 1
            self.content[block] = self.written
            if is_longer and self.chains:
                self.chains[-1].append(block)
            else:
                self.chains.append([block])

    @rule(index=st.integers(0, 20), keys=st.lists(st.integers(0, 7), min_size=1, max_size=3))
    def publish(self, index: int, keys: list[int]) -> None:
        if self.chains:
            chain = self.chains[index % len(self.chains)]
            states = [self.is_own(block) for block in chain]
            first = states.index(True) if True in states else len(chain)
            own = [*states[first:], False].index(False)
            names = [b""] * first + [bytes([key]) * 16 for key in keys[:own]]
            self.pool.publish(chain, names, first, len(names))

    def is_own(self, block: int) -> bool:
        """Return whether a block is outside the cache."""
        return self.pool._run_of[block] is None

    @rule(indices=st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True))
    def share(self, indices: list[int]) -> None:
        names = [*dict.fromkeys(self.some_name(index) for index in indices)]
        found = self.pool.find(names)
        cached = self.pool.find_each(names)
        assert found == [*cached.values()][: len(found)]
        assert len(found) == len(names) or names[len(found)] not in cached
        before, idle = self.pool.available, self.pool.idle_in(found)
        self.pool.share(found)
        self.chains += [found] if found else []
        assert self.pool.available == before - idle

    @rule(index=st.integers(0, 20))
    def fork(self, index: int) -> None:
        if self.chains:
            chain = self.chains[index % len(self.chains)]
            used = self.pool.used
            self.pool.share(chain)
            self.chains.append(chain.copy())
            assert self.pool.used == used

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
        block_of = self.pool.find_each(list(self.pins))
        held = {block for chain in self.chains for block in chain}
        self.pins = {name: it for name, it in self.pins.items() if block_of[name] in held}

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


def pool_of_chain(keys: str, spare: int = 0) -> tuple[BlockPool, list[int]]:
    """Return a pool in which one sequence holds cached blocks, and the blocks."""
    pool = BlockPool(len(keys) + spare)
    blocks = [pool.take() for _ in keys]
    assert None not in blocks
    chain = [block for block in blocks if block is not None]
    pool.publish(chain, names_of(keys), 0, len(keys))
    return pool, chain


def names_of(keys: str) -> list[bytes]:
    return [key.encode() * 16 for key in keys]


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool, blocks = pool_of_chain("abc")
    pool.release(blocks)
    pool.take()
    found = pool.find(names_of("abc"))
    assert (found, pool.idle_in(found)) == (blocks[:2], 2)


def test_the_tail_of_a_chain_is_evicted_before_its_head_after_a_pin() -> None:
    pool, blocks = pool_of_chain("abc")
    pool.release(blocks)
    assert pool.pin(names_of("a"), 10.0, 0.0) == 1
    pool.expire_pins(10.0)
    assert [pool.take(), pool.take()] == blocks[:0:-1]
    assert pool.find(names_of("abc")) == blocks[:1]


def test_a_pinned_chain_is_evicted_from_its_end_after_its_pin() -> None:
    pool, blocks = pool_of_chain("ab", spare=2)
    pool.release(blocks)
    for stop in (1, 2):  # two runs
        assert pool.pin(names_of("ab"[:stop]), 10.0, 0.0) == stop
    pool.expire_pins(10.0)
    assert [pool.take() for _ in range(3)][2] == blocks[1]


def test_chains_that_diverge_share_their_beginning() -> None:
    pool, first = pool_of_chain("abcd", spare=2)
    pool.release(first)
    second = pool.find(names_of("abxy"))
    assert second == first[:2]
    pool.share(second)
    for _ in range(2):
        block = pool.take()
        assert block is not None
        second.append(block)
    pool.publish(second, names_of("abxy"), 2, 4)
    assert (pool.used, pool.available) == (4, 2)
    assert pool.find(names_of("abcd")) == first
    assert pool.find(names_of("abxy")) == second
    assert [pool.take(), pool.take()] == first[:1:-1]
    pool.release(second)
    pool.check()


def test_a_turn_makes_the_run_of_its_chain_longer() -> None:
    pool, chain = pool_of_chain("abc", spare=3)
    pool.release(chain)
    pool.share(chain)
    for stop in (4, 5, 6):
        block = pool.take()
        assert block is not None
        chain.append(block)
        pool.publish(chain, names_of("abcdef"), stop - 1, stop)
    runs = dict.fromkeys(pool._run_of[block] for block in chain)
    assert [run and run.blocks for run in runs] == [chain]


def test_the_beginning_of_a_run_counts_as_used_with_its_end() -> None:
    pool, chain = pool_of_chain("abc", spare=1)
    other = pool.take()
    assert other is not None
    pool.publish([other], names_of("x"), 0, 1)
    pool.release(chain)
    pool.release([other])
    pool.share(chain[1:2])
    assert [pool.take() for _ in range(3)] == [chain[2], other, chain[0]]
    pool.release(chain[1:2])
    pool.check()


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    pool.publish([first], names_of("x"), 0, 1)
    pool.publish([second], names_of("x"), 0, 1)
    assert pool.drain_events() == {b"x" * 16: True}
    pool.release([second])
    pool.release([first])
    assert pool.find(names_of("x")) == [first]


def test_room_is_not_counted_twice_for_a_pinned_block_that_is_shared() -> None:
    pool, blocks = pool_of_chain("x", spare=1)
    pool.release(blocks)
    assert pool.find(names_of("x")) == blocks
    assert pool.idle_in(blocks) == 1
    pool.pin(names_of("x"), 10.0, 0.0)
    assert (pool.available, pool.used) == (1, 0)
    assert pool.find(names_of("x")) == blocks
    assert pool.idle_in(blocks) == 0
    pool.share(blocks)
    assert (pool.available, pool.used) == (1, 1)
