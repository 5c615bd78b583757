"""Tests that after a router resumes, each token counts once, whatever frames were lost."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine.types import RefusedError
from replica.host.core import ORPHAN_GRACE_S
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as wire

WINDOW = 3  # largest number of frames that are sent but not received


class LossyRouter:
    """A router behind a wire that can be cut. It counts only frames that have arrived."""

    def __init__(self, bench) -> None:
        self.bench = bench
        self.epoch = 1
        self.attachment = None
        self.encoder = None
        self.on_wire: deque[bytes] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.prompts: dict[int, int] = {}  # sequence -> number of prompt tokens with logprobs
        self.admitted: set[int] = set()
        self.finished: dict[int, wire.Finished] = {}
        self.attach(0)

    def attach(self, resumed: int) -> None:
        self.epoch += 1
        self.attachment, attached = self.bench.attach(
            "lossy", self.epoch, credit=WINDOW, resumed=resumed
        )
        self.encoder = type(self.bench.encoder)(512)
        self.on_wire.clear()
        # A living sequence must be listed. The ends of all other sequences are in the first frame.
        for resumed_ in attached.resumed:
            known = self.tokens[resumed_.sequence]
            assert resumed_.output[: len(known)] == known
            self.tokens[resumed_.sequence] = list(resumed_.output)
            if resumed_.sequence % 2:
                assert len(resumed_.logprobs.logprob) == len(resumed_.output)
                self.logprobs[resumed_.sequence] = list(resumed_.logprobs.logprob)
                parts = resumed_.prompt_logprobs
                self.prompts[resumed_.sequence] = sum(len(part.logprob) for part in parts)
        listed = {resumed_.sequence for resumed_ in attached.resumed}
        assert listed | self.finished.keys() == self.tokens.keys()

    def submit(self, number: int, count: int) -> None:
        sampling = wire.Sampling(seed=number, logprobs=0 if number % 2 else None)
        self.tokens[number], self.logprobs[number], self.prompts[number] = [], [], 0
        message = wire.Sequence(
            id=number,
            prompt=[1, 2, 3],
            output_tokens_max=count,
            sampling=sampling,
            prompt_logprobs=1 if number % 2 else None,
        )
        self.bench.submit(message, epoch=self.epoch)

    def send(self) -> None:
        news, _ = self.attachment.outbox.take(0)
        if news is not None:
            self.on_wire.append(self.encoder.encode(news))

    def receive(self) -> None:
        if not self.on_wire:
            return
        frame = wire.HostFrame.FromString(self.on_wire.popleft()).step
        self.bench.core.credit(self.epoch, 1)
        tokens = iter(frame.token)
        for sequence, count in zip(frame.sequence, frame.count, strict=True):
            assert sequence not in self.finished
            self.tokens[sequence] += [next(tokens) for _ in range(count)]
        for sequence, logprob in zip(frame.logprobs.sequence, frame.logprobs.logprob, strict=True):
            self.logprobs[sequence].append(logprob)
        for part in frame.prompt_logprobs:
            self.prompts[part.sequence] += len(part.logprob)
        self.admitted.update(fact.sequence for fact in frame.admitted)
        for finished in frame.finished:
            known = self.finished.setdefault(finished.sequence, finished)
            assert known == finished
            assert finished.output_tokens == len(self.tokens[finished.sequence])


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 12)),
        st.tuples(st.sampled_from(["step", "send", "receive", "step", "cut", "orphan"])),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(operations=OPERATIONS)
def test_every_token_and_every_end_arrives_exactly_once(
    bench_class, expected_tokens, operations
) -> None:
    bench = bench_class(None)
    router = LossyRouter(bench)
    counts: dict[int, int] = {}
    for name, *arguments in operations:
        if name == "submit":
            number = len(counts) + 1
            counts[number] = arguments[0]
            router.submit(number, counts[number])
        elif name == "step":
            bench.step()
        elif name == "send":
            router.send()
        elif name == "receive":
            router.receive()
        # frames on the wire are lost, and the host may compute further steps before it notices
        else:
            if name == "orphan":
                bench.core.orphan(router.epoch, bench.now_s)
                bench.step()
            router.attach(resumed=router.epoch)
    for _ in range(1000):
        bench.step()
        router.send()
        router.receive()
        if len(router.finished) == len(counts):
            break
    assert router.tokens == {key: expected_tokens(key, count) for key, count in counts.items()}
    assert router.finished.keys() == counts.keys() == router.admitted
    assert router.prompts == {key: 2 if key % 2 else 0 for key in counts}
    for key, values in router.logprobs.items():
        assert len(values) == (counts[key] if key % 2 else 0)
    assert len(bench.core.sequences) == 0


def sequence(number: int, count: int = 100) -> wire.Sequence:
    return wire.Sequence(id=number, prompt=[1], output_tokens_max=count)


def test_an_unresumed_attachment_is_cancelled(make_bench) -> None:
    bench = make_bench()
    bench.submit(sequence(1))
    bench.step()
    _, attached = bench.attach("r1", 2)
    assert list(attached.resumed) == []
    assert len(bench.core.sequences) == 0
    bench.step()
    assert not bench.driver.running


def test_no_router_resumes_sequences_of_another(make_bench) -> None:
    bench = make_bench()
    bench.submit(sequence(1))
    bench.step()
    _, attached = bench.attach("r2", 2, resumed=1)
    assert list(attached.resumed) == []
    before = len(bench.tokens[1])
    bench.step()
    assert len(bench.tokens[1]) == before + 1


def test_a_conflict_leaves_the_older_attachment_as_it_is(make_bench) -> None:
    bench = make_bench()
    bench.attach("r2", 9)
    bench.submit(sequence(1))
    with pytest.raises(RefusedError) as caught:
        bench.attach("r1", 9, resumed=1)
    assert caught.value.code is ErrorCode.CONFLICT
    assert bench.step() is not None
    assert len(bench.core.sequences) == 1


def test_after_the_grace_there_is_nothing_to_resume(make_bench) -> None:
    bench = make_bench()
    bench.submit(sequence(1))
    bench.step()
    bench.core.orphan(1, bench.now_s)
    bench.now_s += ORPHAN_GRACE_S / 2
    bench.step()
    assert len(bench.core.sequences) == 1
    bench.now_s += ORPHAN_GRACE_S
    bench.step()
    assert len(bench.core.sequences) == 0
    _, attached = bench.attach("r1", 2, resumed=1)
    assert list(attached.resumed) == []


def test_unsent_ends_are_sent_to_the_returning_router(make_bench) -> None:
    bench = make_bench()
    bench.submit(sequence(1, 3))
    bench.core.orphan(1, bench.now_s)
    bench.core.sequences.take(bench.attachment, [sequence(2, 0), sequence(3)], 0.0)
    for _ in range(5):
        bench.core.publish(bench.core.step(), bench.now_s)
    bench.attachment, attached = bench.attach("r1", 2, resumed=1)
    assert {r.sequence: len(r.output) for r in attached.resumed} == {1: 3, 2: 1, 3: 5}
    bench.step()
    assert bench.finished.keys() == {1, 2}
    assert bench.core.outbox(1) is None


def test_routers_are_bounded_but_may_come_back(make_bench, monkeypatch) -> None:
    monkeypatch.setattr("replica.host.core.ATTACHMENTS_MAX", 2)
    bench = make_bench()
    bench.attach("r2", 2)
    with pytest.raises(RefusedError, match="2 routers are attached") as caught:
        bench.attach("r3", 3)
    assert caught.value.code is ErrorCode.ENGINE_BUSY
    bench.attach("r2", 4)


def test_an_epoch_of_zero_resumes_nothing_by_accident(make_bench) -> None:
    bench = make_bench()
    bench.attach("r2", 0)
    bench.submit(sequence(1), epoch=0)
    _, attached = bench.attach("r2", 5)
    assert list(attached.resumed) == []
    assert len(bench.core.sequences) == 0
