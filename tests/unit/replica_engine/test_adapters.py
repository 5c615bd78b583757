from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from replica.engine.adapter_table import AdapterTable
from replica.engine.plan import ScheduledSequence
from replica.engine.types import Finish, RefusedError, SequenceRequest
from replica.engine.waiting import OVERTAKEN_MAX, WaitingQueue
from sluice.hashing import cache_root


class Weights:
    rank = 4

    def __init__(self, memory_bytes: int = 100) -> None:
        self.memory_bytes = memory_bytes


def digest_of(number: int) -> str:
    return f"{number:064x}"


def put(engine, *numbers: int) -> None:
    for number in numbers:
        digest = digest_of(number)
        engine.put_adapter(digest, engine.read_adapter(digest, None))


def request(key: int, adapter: int, prompt: list[int], count: int = 10, **options):
    digest = digest_of(adapter) if adapter else ""
    root = cache_root("base", digest, b"")
    values = {"ignore_eos": True, **options}
    return SequenceRequest(key, prompt, count, adapter_digest=digest, cache_root=root, **values)


class TableMachine(RuleBasedStateMachine):
    """Random uses of a table with two slots and room for three adapters in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = AdapterTable(2, 300)
        self.living: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        # slot -> adapter that a backend would have after all loads
        self.in_slots: dict[int, object] = {}
        self.weights = {digest_of(number): Weights() for number in range(5)}

    @rule(number=st.integers(0, 4))
    def put(self, number: int) -> None:
        digest = digest_of(number)
        try:
            self.table.put(digest, self.weights[digest])
        except RefusedError as error:
            assert error.code == "engine_busy"
            assert len(+self.living) == 3
        else:
            assert self.table.has(digest)

    @rule(number=st.integers(0, 4))
    def drop(self, number: int) -> None:
        digest = digest_of(number)
        self.table.drop(digest)
        assert not self.table.has(digest)
        held = {state.digest for state in self.table.states({})}
        assert (digest in held) == bool(self.living[digest])

    @rule(number=st.integers(0, 4))
    def join(self, number: int) -> None:
        digest = digest_of(number)
        if self.table.has(digest):
            self.table.join(digest)
            self.living[digest] += 1

    @rule(number=st.integers(0, 4))
    def run(self, number: int) -> None:
        digest = digest_of(number)
        can_run = self.table.has_room or self.table.slot_of(digest) is not None
        if self.living[digest] > self.running[digest] and can_run:
            slot = self.table.acquire(digest)
            self.running[digest] += 1
            self.in_slots.update(self.table.take_loads())
            assert self.in_slots[slot] is self.weights[digest]

    @rule(number=st.integers(0, 4), ends=st.booleans())
    def stop(self, number: int, ends: bool) -> None:
        digest = digest_of(number)
        if self.running[digest]:
            self.table.release(digest)
            self.running[digest] -= 1
        if ends and self.living[digest] > self.running[digest]:
            self.table.leave(digest, 1)
            self.living[digest] -= 1

    @invariant()
    def slots_and_memory_add_up(self) -> None:
        self.table.check()
        states = {state.digest: state for state in self.table.states({})}
        assert {d: s.sequences for d, s in states.items() if s.sequences} == +self.living
        assert {d for d, s in states.items() if s.is_in_slot} == set(self.table.resident)
        for digest in +self.running:
            slot = self.table.slot_of(digest)
            assert slot is not None
            assert self.in_slots[slot] is self.weights[digest]


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=50, stateful_step_count=40)


def test_host_memory_forgets_the_longest_unused_and_none_in_use() -> None:
    table = AdapterTable(1, 300)
    for name in "abc":
        table.put(name, Weights())
    table.join("a")
    table.put("d", Weights())
    assert [table.has(name) for name in "abcd"] == [True, False, True, True]
    table.put("c", Weights())  # this use makes c the most recently used adapter
    table.put("e", Weights())
    assert [table.has(name) for name in "acde"] == [True, True, False, True]
    with pytest.raises(RefusedError, match="300 bytes") as caught:
        table.put("huge", Weights(201))
    assert caught.value.code == "engine_busy"
    assert [table.has(name) for name in "ace"] == [True, True, True]
    with pytest.raises(RefusedError, match="301 bytes; the engine has 300") as caught:
        table.put("huger", Weights(301))
    assert caught.value.code == "adapter_invalid"


def test_counters_outlive_the_adapter() -> None:
    table = AdapterTable(1, 100)
    table.put("a", Weights())
    table.join("a")
    table.acquire("a")
    table.count_prompt("a", 7)
    table.release("a")
    table.leave("a", 5)
    table.put("b", Weights())
    table.put("a", Weights())
    (state,) = table.states({})
    assert (state.prompt_tokens, state.output_tokens, state.loads) == (7, 5, 1)


def test_residents_are_the_same_object_until_they_change() -> None:
    table = AdapterTable(2, 300)
    for name in "bac":
        table.put(name, Weights())
        table.join(name)
    table.acquire("b")
    table.acquire("a")
    before = table.resident
    assert before == ("a", "b")
    table.release("a")
    table.acquire("a")
    table.release("b")
    assert table.resident is before
    table.acquire("c")
    assert table.resident == ("a", "c")


def test_the_longest_idle_adapter_leaves_its_slot_first() -> None:
    table = AdapterTable(2, 300)
    for name in "abc":
        table.put(name, Weights())
        table.join(name)
    slots = {name: table.acquire(name) for name in "ab"}
    assert not table.has_room
    for name in "ab":
        table.release(name)
    assert table.acquire("c") == slots["a"]
    assert table.resident == ("b", "c")


def test_an_unknown_adapter_is_refused(make_engine) -> None:
    engine = make_engine()
    with pytest.raises(RefusedError, match="load it before") as caught:
        engine.add(request(1, 5, [1, 2]))
    assert caught.value.code == "adapter_not_found"
    assert not engine.has_work


def test_each_adapter_is_in_its_slot_in_the_step_of_its_first_token(
    make_engine, run_to_end, expected_output
) -> None:
    engine = make_engine(slots=2)
    put(engine, 1, 2)
    prompt = [3, 4, 5] * 20
    for key in range(6):
        engine.add(request(key, key % 3, prompt))
    out = run_to_end(engine)
    for key in range(6):
        assert out[key] == expected_output(prompt, 10, stop=frozenset(), adapter=key % 3)
    loads = [len(plan.loads) for plan in engine._backend.plans]
    assert sum(loads) == 2
    assert engine.load().adapters_resident == (digest_of(1), digest_of(2))
    for state in engine.adapters():
        assert (state.prompt_tokens, state.output_tokens, state.loads) == (120, 20, 1)
        assert (state.sequences, state.is_in_slot, state.rank) == (0, True, 4)


def test_a_request_without_a_slot_does_not_block_the_ones_behind(make_engine, run_to_end) -> None:
    engine = make_engine(slots=1)
    put(engine, 1, 2)
    engine.add(request(1, 1, [1] * 10, 20))
    engine.add(request(2, 2, [1] * 10))
    engine.add(request(3, 0, [1] * 10))
    engine.add(request(4, 1, [1] * 10))
    assert engine.step().keys == [1, 3, 4]
    assert (engine.load().running, engine.load().waiting) == (3, 1)
    order = []
    run_to_end(engine, lambda events: order.extend(event.key for event in events.finished))
    assert order == [3, 4, 1, 2]


def test_a_dropped_adapter_waits_for_its_sequences(make_engine, run_to_end) -> None:
    engine = make_engine()
    put(engine, 1)
    engine.add(request(1, 1, [1] * 10))
    engine.step()
    engine.drop_adapter(digest_of(1))
    assert not engine.has_adapter(digest_of(1))
    assert engine.adapters()[0].output_tokens == 1
    with pytest.raises(RefusedError, match="load it before"):
        engine.add(request(2, 1, [1] * 10))
    assert len(run_to_end(engine)[1]) == 9
    assert engine.adapters() == []
    assert engine.load().adapters_resident == ()


def test_loads_of_a_failed_step_are_repeated_for_the_surviving_requests(
    make_engine, run_to_end, expected_output
) -> None:
    engine = make_engine(slots=1, step_tokens=8)
    put(engine, 1)
    engine.add(request(1, 1, [1] * 10))
    engine._backend.is_broken = True
    (event,) = engine.step().finished
    assert event.reason is Finish.FAILED
    assert engine.load().adapters_resident == ()
    engine._backend.is_broken = False
    engine.add(request(2, 1, [2] * 10))
    assert run_to_end(engine)[2] == expected_output([2] * 10, 10, stop=frozenset(), adapter=1)


def test_preemption_gives_the_slot_back(make_engine, run_to_end, expected_output) -> None:
    engine = make_engine(blocks=8, slots=1)
    put(engine, 1, 2)
    engine.add(request(1, 1, [1] * 20, 150, priority=1))
    engine.add(request(2, 1, [2] * 20, 150))
    engine.add(request(3, 2, [3] * 20, 150))
    out = run_to_end(engine)
    assert engine.load().preemptions > 0
    for key, adapter in ((1, 1), (2, 1), (3, 2)):
        wanted = expected_output([key] * 20, 150, stop=frozenset(), adapter=adapter)
        assert out[key] == wanted


@settings(max_examples=25)
@given(
    arrivals=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    late=st.integers(1, 5),
)
def test_a_stream_of_others_cannot_keep_an_adapter_out(make_engine, arrivals, counts, late) -> None:
    """New sequences of two adapters always want both slots."""
    engine = make_engine(slots=2, sequences=8, blocks=200, step_tokens=200)
    put(engine, 1, 2, 3)
    key = 0
    waited_for = None
    for step in range(400):
        for number in arrivals:
            key += 1
            adapter = 1 + key % 2
            engine.add(request(key, adapter, [number] * 10, counts[key % 4]))
        if step == late:
            engine.add(request(10_000, 3, [9] * 10, 3))
        events = engine.step()
        if 10_000 in [event.key for event in events.admitted]:
            waited_for = step - late
            break
    # The sequences that overtake it, and then those in its slot, all run to their end.
    assert waited_for is not None
    assert waited_for <= (OVERTAKEN_MAX + 8 * len(arrivals)) * max(counts)


def test_requests_behind_join_other_slots_while_one_is_claimed() -> None:
    table = AdapterTable(2, 1000)
    queue = WaitingQueue(table)
    for name in "abc":
        table.put(name, Weights())

    def sequence(arrival: int, digest: str) -> ScheduledSequence:
        asked = SequenceRequest(arrival, [1], 1, adapter_digest=digest)
        table.join(digest)
        return ScheduledSequence(asked, arrival, b"", frozenset())

    def admit() -> int:
        first = queue.first()
        assert first is not None
        queue.pop(first)
        table.acquire(first.request.adapter_digest)
        return first.arrival

    for arrival, digest in enumerate("aabbb"):
        queue.push(sequence(arrival, digest))
    assert [admit() for _ in range(5)] == list(range(5))
    queue.push(sequence(5, "c"))
    for arrival in range(6, 6 + OVERTAKEN_MAX):
        queue.push(sequence(arrival, "b"))
        assert admit() == arrival
    queue.push(sequence(100, "a"))  # the slot of a has the fewest sequences, so it is claimed
    queue.push(sequence(101, "b"))
    assert admit() == 101
    assert queue.first() is None
    for _ in range(2):
        table.release("a")
    assert admit() == 5
    queue.push(sequence(102, "b"))
    assert admit() == 102
    assert queue.first() is None  # a has left its slot
    assert queue.count == 1


class QueueMachine(RuleBasedStateMachine):
    """Random arrivals, ends and admissions with two slots, compared with a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.table = AdapterTable(2, 1000)
        self.queue = WaitingQueue(self.table)
        self.waiting: list[ScheduledSequence] = []
        self.running: list[ScheduledSequence] = []
        self.arrivals = 0
        for name in "abcd":
            self.table.put(name, Weights())

    @rule(digest=st.sampled_from(["", *"abcd"]), priority=st.integers(0, 1))
    def push(self, digest: str, priority: int) -> None:
        self.arrivals += 1
        asked = SequenceRequest(self.arrivals, [1], 1, adapter_digest=digest, priority=priority)
        sequence = ScheduledSequence(asked, self.arrivals, b"", frozenset())
        if digest:
            self.table.join(digest)
        self.queue.push(sequence)
        self.waiting.append(sequence)

    @rule(index=st.integers(0, 50))
    def end(self, index: int) -> None:
        if self.waiting:
            self.queue.discard(self.waiting.pop(index % len(self.waiting)))

    @rule(index=st.integers(0, 50))
    def preempt(self, index: int) -> None:
        if self.running:
            sequence = self.running.pop(index % len(self.running))
            if sequence.request.adapter_digest:
                self.table.release(sequence.request.adapter_digest)
            self.queue.push(sequence)
            self.waiting.append(sequence)

    @rule()
    def admit(self) -> None:
        first = self.queue.first()
        if first is not None:
            self.queue.pop(first)
            self.waiting.remove(first)
            if first.request.adapter_digest:
                self.table.acquire(first.request.adapter_digest)
            self.running.append(first)

    @invariant()
    def the_first_is_the_most_important_that_may_run(self) -> None:
        self.waiting.sort(key=ScheduledSequence.rank)
        ready, passed_over = [], []
        for sequence in self.waiting:
            digest = sequence.request.adapter_digest
            can_run = not digest or self.table.has_room or self.table.slot_of(digest) is not None
            (ready if can_run else passed_over).append(sequence)
        first = self.queue.first()
        assert self.queue._claimant is (passed_over[0] if passed_over else None)
        if self.queue._claimed_slot is None:
            assert first is (ready[0] if ready else None)
        assert self.queue.count == self.queue.tokens == len(self.waiting)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=50, stateful_step_count=40)


def test_ended_sequences_do_not_pile_up_in_the_queue() -> None:
    queue = WaitingQueue(AdapterTable(0, 0))
    head = ScheduledSequence(SequenceRequest(0, [1], 1), 0, b"", frozenset())
    queue.push(head)
    for arrival in range(1, 500):
        other = ScheduledSequence(SequenceRequest(arrival, [1], 1), arrival, b"", frozenset())
        queue.push(other)
        queue.discard(other)
        other.ended = True
        assert queue.first() is head
    assert (queue.count, queue.tokens) == (1, 1)
    assert len(queue._heaps[""]) < 50
