"""The prefix index against a naive model, its bounds, and what late events may do to it."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import zip_longest

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core.fleet.prefix_index import REMOVAL_GUARD_S, BlockHashes, PrefixIndex
from sluice.hashing import block_hashes

REPLICAS = ("a", "b", "c")
ROOM = 12
SLACK = ROOM // 8


def chain(tokens: Sequence[int]) -> list[Hashable]:
    """Return the chained hashes of a prompt whose blocks have one token each."""
    return [tuple(tokens[: end + 1]) for end in range(len(tokens))]


class Naive:
    """One replica: an exact LRU cache of (time of the last dispatch) by block."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[Hashable, float] = OrderedDict()
        self.has_events = False

    def shrink(self) -> None:
        while len(self.blocks) > ROOM + (SLACK if self.has_events else 0):
            self.blocks.popitem(last=False)


def walk(held: dict[str, Naive], prompt: Sequence[Hashable]) -> dict[str, int]:
    """Count leading blocks one by one."""
    found: dict[str, int] = {}
    for name, naive in held.items():
        leading = 0
        while leading < len(prompt) and prompt[leading] in naive.blocks:
            leading += 1
        if leading:
            found[name] = leading
    return found


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=ROOM).map(chain)
NAMES = st.sampled_from(REPLICAS)


class IndexMachine(RuleBasedStateMachine):
    """Dispatches, events and losses in any order."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.model: dict[str, Naive] = {}
        self.now = 0.0
        for name in REPLICAS:
            self.add(name)

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        self.index.add_replica(name, ROOM)
        self.model[name] = Naive()

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.index.drop_replica(name)
        self.model.pop(name, None)

    @rule(name=NAMES)
    def reset(self, name: str) -> None:
        self.index.reset(name)
        if name in self.model:
            self.model[name] = Naive()
            self.model[name].has_events = True

    @rule(seconds=st.floats(0.0, 3 * REMOVAL_GUARD_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=NAMES, prompt=PROMPTS)
    def dispatch(self, name: str, prompt: list[Hashable]) -> None:
        self.index.dispatched(name, prompt, self.now)
        if naive := self.model.get(name):
            for key in reversed(prompt):
                naive.blocks[key] = self.now
                naive.blocks.move_to_end(key)
            naive.shrink()

    @rule(name=NAMES, prompt=PROMPTS, first=st.integers(0, ROOM))
    def store(self, name: str, prompt: list[Hashable], first: int) -> None:
        self.index.stored(name, prompt[first:], self.now)
        if naive := self.model.get(name):
            naive.has_events = True
            for key in reversed(prompt[first:]):
                naive.blocks.setdefault(key, float("-inf"))
            naive.shrink()

    @rule(name=NAMES, prompts=st.lists(PROMPTS, min_size=2, max_size=3), first=st.integers(0, 4))
    def store_of_several(self, name: str, prompts: list[list[Hashable]], first: int) -> None:
        """A step brings blocks of many sequences, and does not say which follows which."""
        mixed = [key for row in zip_longest(*prompts) for key in row[first % 2 :] if key]
        self.store(name, list(dict.fromkeys(mixed)), first)

    @rule(name=NAMES, prompt=PROMPTS, first=st.integers(0, ROOM), tail_first=st.booleans())
    def remove(self, name: str, prompt: list[Hashable], first: int, tail_first: bool) -> None:
        gone = prompt[first:]
        self.index.removed(name, gone[::-1] if tail_first else gone, self.now)
        if naive := self.model.get(name):
            naive.has_events = True
            for key in prompt[first:]:
                if naive.blocks.get(key, self.now) <= self.now - REMOVAL_GUARD_S:
                    del naive.blocks[key]

    @rule(prompt=PROMPTS)
    def look_up(self, prompt: list[Hashable]) -> None:
        assert self.index.matches(prompt) == walk(self.model, prompt)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        self.index.check()
        held = {name: set(found.where) for name, found in self.index._held.items()}
        assert held == {name: set(naive.blocks) for name, naive in self.model.items()}
        assert len(self.index) == sum(map(len, held.values()))


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
test_index_machine = IndexMachine.TestCase


def numbers(first: int, count: int) -> list[Hashable]:
    return list(range(first, first + count))


def an_index(room: int = 100, names: Sequence[str] = REPLICAS) -> PrefixIndex:
    index = PrefixIndex()
    for name in names:
        index.add_replica(name, room)
    return index


def test_tails_are_forgotten_before_heads_and_old_prompts_before_new_ones() -> None:
    index = an_index(10)
    index.dispatched("a", numbers(0, 6), 1.0)
    index.dispatched("a", numbers(100, 6), 2.0)
    assert index.matches(numbers(0, 6)) == {"a": 4}
    assert index.matches(numbers(100, 6)) == {"a": 6}
    index.dispatched("a", numbers(0, 3), 3.0)  # used again: it outlives the newer prompt
    index.dispatched("a", numbers(200, 4), 4.0)
    assert index.matches(numbers(0, 6)) == {"a": 3}
    assert index.matches(numbers(100, 6)) == {"a": 3}


def test_a_late_removal_does_not_undo_a_newer_dispatch_but_a_later_one_is_believed() -> None:
    index = an_index()
    prompt = numbers(0, 8)
    index.dispatched("a", prompt, 10.0)
    index.dispatched("a", prompt, 100.0)
    index.removed("a", prompt[2:], 100.0 + REMOVAL_GUARD_S - 0.001)
    assert index.matches(prompt) == {"a": 8}
    index.removed("a", prompt[2:], 100.0 + REMOVAL_GUARD_S)
    assert index.matches(prompt) == {"a": 2}


def test_blocks_known_from_the_engine_alone_go_at_its_word() -> None:
    index = an_index()
    index.stored("a", numbers(0, 8), 10.0)
    index.removed("a", numbers(5, 3), 10.0)
    assert index.matches(numbers(0, 8)) == {"a": 5}
    index.removed("a", numbers(500, 3), 10.0)  # never heard of
    index.check()


def test_a_replica_that_reports_is_not_guessed_at_within_the_slack() -> None:
    index = an_index(80)
    index.stored("a", numbers(0, 80), 1.0)
    index.dispatched("a", numbers(1000, 10), 2.0)
    assert index.matches(numbers(0, 80)) == {"a": 80}  # the engine will say what it evicted
    index.removed("a", numbers(70, 10), 2.1)
    assert index.matches(numbers(0, 80)) == {"a": 70}
    assert len(index) == 80


def test_answers_of_several_sequences_in_one_report_continue_their_prompts() -> None:
    index = an_index()
    first, second = numbers(0, 10), numbers(100, 10)
    index.dispatched("a", first[:7], 1.0)
    index.dispatched("a", second[:5], 1.0)
    index.dispatched("b", second[:5], 1.0)
    for step in range(3):
        index.stored("a", [first[7 + step], second[5 + step]], 2.0 + step)
    index.stored("b", [900, *second[5:7], 901], 9.0)
    assert index.matches(first) == {"a": 10}
    assert index.matches(second) == {"a": 8, "b": 7}
    index.check()


def test_a_snapshot_replaces_earlier_knowledge() -> None:
    index = an_index()
    index.dispatched("a", numbers(0, 8), 1.0)
    index.dispatched("b", numbers(0, 4), 1.0)
    index.reset("a")
    assert index.matches(numbers(0, 8)) == {"b": 4}
    index.stored("a", numbers(0, 6), 1.0)
    assert index.matches(numbers(0, 8)) == {"a": 6, "b": 4}


def test_a_dropped_replica_is_gone_and_its_place_is_clean_for_the_next() -> None:
    index = an_index()
    for name in REPLICAS:
        index.dispatched(name, numbers(0, 5), 1.0)
    index.drop_replica("b")
    index.drop_replica("b")
    assert index.matches(numbers(0, 5)) == {"a": 5, "c": 5}
    index.add_replica("d", 100)
    assert index.matches(numbers(0, 5)) == {"a": 5, "c": 5}
    index.dispatched("d", numbers(0, 2), 2.0)
    index.add_replica("b", 100)
    assert index.matches(numbers(0, 5)) == {"a": 5, "c": 5, "d": 2}
    index.check()


def test_a_prompt_that_names_a_block_twice_does_no_harm() -> None:
    index = an_index()
    index.dispatched("a", [1, 2, 1, 3, 3], 1.0)
    index.stored("b", [7, 8, 7], 1.0)
    index.dispatched("b", [1, 2, 1], 2.0)
    index.check()
    assert len(index) == 3 + 2 + 2
    index.drop_replica("a")
    index.drop_replica("b")
    index.check()


def test_unknown_replicas_and_empty_prompts_change_nothing() -> None:
    index = an_index()
    index.dispatched("stranger", numbers(0, 5), 1.0)
    index.stored("stranger", numbers(0, 5), 1.0)
    index.removed("stranger", numbers(0, 5), 1.0)
    index.reset("stranger")
    index.dispatched("a", [], 1.0)
    assert (index.matches(numbers(0, 5)), index.matches([]), len(index)) == ({}, {}, 0)


class Counting(Sequence[Hashable]):
    """A prompt that counts how many of its blocks are looked at."""

    def __init__(self, blocks: Sequence[Hashable]) -> None:
        self.blocks = blocks
        self.looks = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index):
        self.looks += 1
        return self.blocks[index]


def test_a_long_prompt_costs_a_few_lookups_per_different_set_of_holders() -> None:
    names = [f"r{number}" for number in range(64)]
    index = an_index(2000, names)
    prompt = numbers(0, 1718)
    for name in names:
        index.dispatched(name, prompt[:20], 1.0)  # all have the system prompt
    for name in names[:8]:
        index.dispatched(name, prompt[:900], 1.0)
    index.dispatched(names[5], prompt, 1.0)
    counting = Counting(prompt)
    found = index.matches(counting)
    assert found == dict.fromkeys(names, 20) | dict.fromkeys(names[:8], 900) | {names[5]: 1718}
    assert counting.looks <= 3 * 12


def test_a_turn_of_a_long_chain_is_recorded_with_a_few_lookups_of_its_history() -> None:
    index = an_index(2000, ["r"])
    prompt = numbers(0, 1718)
    for turn in range(1, 46):
        index.dispatched("r", prompt[: 38 * turn], float(turn))
    counting = Counting(prompt)
    index.dispatched("r", counting, 46.0)
    assert counting.looks <= 2 * 46
    assert index.matches(prompt) == {"r": 1718}
    index.check()


def test_a_prompt_that_leaves_a_known_run_is_recorded_from_there() -> None:
    index = an_index(2000, ["r"])
    index.dispatched("r", numbers(0, 100), 1.0)
    for prompt in (numbers(0, 40), [*numbers(0, 60), *numbers(500, 40)], numbers(0, 30)):
        index.dispatched("r", prompt, 2.0)
        index.check()
        assert index.matches(prompt) == {"r": len(prompt)}
    assert len(index) == 140


def test_a_million_entries_stay_within_the_bound_and_are_found() -> None:
    names = [f"r{number}" for number in range(32)]
    index = an_index(33_000, names)
    blocks = 500
    for turn in range(32 * 70):
        index.dispatched(names[turn % 32], range(turn * blocks, (turn + 1) * blocks), float(turn))
    assert len(index) == 32 * 33_000
    newest = 32 * 70 - 1
    assert index.matches(range(newest * blocks, (newest + 1) * blocks)) == {names[31]: blocks}
    assert index.matches(range(blocks)) == {}
    for name in names:
        index.drop_replica(name)
    assert len(index) == 0
    index.check()


def test_hashes_from_bytes_are_the_same_blocks_wherever_they_come_from() -> None:
    hashes = block_hashes(list(range(320)), b"r" * 16, 10)
    prompt = BlockHashes(b"".join(hashes))
    index = an_index()
    index.dispatched("a", prompt, 1.0)
    index.stored("b", BlockHashes(b"".join(hashes[:4])), 1.0)
    assert index.matches(BlockHashes(b"".join(hashes[:7]))) == {"a": 7, "b": 4}
    assert (len(prompt), list(prompt)) == (10, [prompt[i] for i in range(10)])
    assert list(prompt[2:4]) == list(prompt)[2:4]
    with pytest.raises(ValueError, match="not a multiple"):
        BlockHashes(b"x" * 17)
