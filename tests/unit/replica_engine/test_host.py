"""The host with its real threads over the sim driver; time is real, nothing is asserted on it
except that something comes at all."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replica.drivers.sim import load_sim
from replica.host import INBOX_SEQUENCES_MAX, PROBES_MAX, EngineHost
from sluice.wire.engine.v1 import engine_pb2 as wire

WAIT_S = 20.0
FAST = {"cost_step_s": 0.001, "cost_prefill_token_s": 0.0, "cost_context_token_s": 0.0}


class FakeResponder:
    """Records frames; complains as Triton would crash."""

    def __init__(self) -> None:
        self.frames: list[wire.HostFrame] = []
        self.is_finished = False
        self.is_gone = False
        self.errors: list[str] = []
        self._changed = threading.Condition()

    def send(self, frame: bytes) -> None:
        with self._changed:
            if self.is_finished:
                self.errors.append("send after finish")
            self.frames.append(wire.HostFrame.FromString(frame))
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            if self.is_finished:
                self.errors.append("finished twice")
            self.is_finished = True
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        if self.is_finished:
            self.errors.append("is_cancelled after finish")
        return self.is_gone

    def wait(self, predicate: Callable[["FakeResponder"], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: predicate(self), WAIT_S), self.frames[-3:]

    @property
    def steps(self) -> list[wire.StepFrame]:
        return [frame.step for frame in self.frames if frame.HasField("step")]

    @property
    def tokens(self) -> dict[int, list[int]]:
        got: dict[int, list[int]] = defaultdict(list)
        for step in self.steps:
            tokens = iter(step.token)
            for sequence, count in zip(step.sequence, step.count, strict=True):
                got[sequence] += [next(tokens) for _ in range(count)]
        return dict(got)

    @property
    def finished(self) -> dict[int, wire.Finished]:
        ended = [finished for step in self.steps for finished in step.finished]
        by_id = {finished.sequence: finished for finished in ended}
        assert len(by_id) == len(ended)
        return by_id


class Router:
    """One attachment, from a router's side."""

    def __init__(self, host: EngineHost, epoch: int, name: str = "r1", credit: int = 1000) -> None:
        self.host, self.epoch = host, epoch
        self.attached = FakeResponder()
        attach = wire.Attach(router_id=name, epoch=epoch, credit_frames=credit)
        self.host.handle(wire.HostRequest(attach=attach).SerializeToString(), self.attached)
        self.attached.wait(lambda r: len(r.frames) > 0)

    def send(self, **kind) -> FakeResponder:
        responder = FakeResponder()
        self.host.handle(wire.HostRequest(**kind).SerializeToString(), responder)
        return responder

    def submit(self, *ids: int, count: int = 5, **options) -> FakeResponder:
        values = {"prompt": [5, 6, 7], "output_tokens_max": count, **options}
        sequences = [wire.Sequence(id=number, **values) for number in ids]
        return self.send(submit=wire.Submit(epoch=self.epoch, sequences=sequences))

    def cancel(self, *ids: int) -> None:
        self.send(cancel=wire.Cancel(epoch=self.epoch, sequences=ids))

    def credit(self, frames: int) -> None:
        self.send(credit=wire.Credit(epoch=self.epoch, frames=frames))

    def wait_finished(self, *ids: int) -> dict[int, wire.Finished]:
        self.attached.wait(lambda r: set(ids) <= r.finished.keys())
        return self.attached.finished


@pytest.fixture
def make_host(model_dir: Path) -> Iterator[Callable[..., EngineHost]]:
    hosts: list[EngineHost] = []

    def make(waiting_max: int = 1024, **options) -> EngineHost:
        driver = load_sim(model_dir, "base", {**FAST, **options})
        host = EngineHost(driver, "base", waiting_max=waiting_max)
        host.start()
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.close(0.0)
        assert not host._loop.is_alive()
        assert not any(sender.is_alive() for sender in host._senders)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def idle(host: EngineHost) -> bool:
    load = host.load
    return (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)


def test_attach_submit_and_the_end_of_everything(make_host) -> None:
    router = Router(make_host(), epoch=3)
    attached = router.attached.frames[0].attached
    assert (attached.epoch, attached.limits.engine, attached.limits.base_digest) == (
        3,
        "sim",
        "base",
    )
    assert (attached.limits.block_tokens, attached.limits.context_tokens_max) == (32, 2048)
    answer = router.submit(1, 2, count=7)
    finished = router.wait_finished(1, 2)
    assert answer.is_finished
    assert answer.frames == []
    assert {key: len(tokens) for key, tokens in router.attached.tokens.items()} == {1: 7, 2: 7}
    assert finished[1].reason == wire.FINISH_REASON_LENGTH
    assert (finished[1].prompt_tokens, finished[1].output_tokens) == (3, 7)
    admitted = [fact.sequence for step in router.attached.steps for fact in step.admitted]
    assert admitted == [1, 2]
    numbers = [step.step for step in router.attached.steps]
    assert numbers == sorted(numbers)
    covered = sum(step.steps for step in router.attached.steps)
    assert covered == numbers[-1]
    router.send(detach=wire.Detach(epoch=3))
    router.attached.wait(lambda r: r.is_finished)
    assert router.attached.errors == []


def test_an_idle_engine_sends_signs_of_life(make_host) -> None:
    router = Router(make_host(), epoch=1)
    router.attached.wait(lambda r: len(r.steps) >= 3)
    assert router.attached.steps[0].kv_events.reset
    assert all(not step.sequence for step in router.attached.steps)


def test_a_frozen_step_loop_gives_no_sign_of_life(make_host, monkeypatch) -> None:
    host = make_host()
    router = Router(host, epoch=1)
    router.attached.wait(lambda r: len(r.steps) >= 1)
    frozen, thaw = threading.Event(), threading.Event()
    publish = host._core.publish

    def hang(*args: object) -> None:
        frozen.set()
        thaw.wait(WAIT_S)
        publish(*args)

    monkeypatch.setattr(host._core, "publish", hang)
    assert frozen.wait(WAIT_S)
    before = len(router.attached.steps)
    time.sleep(0.6)
    assert len(router.attached.steps) == before
    thaw.set()
    router.attached.wait(lambda r: len(r.steps) > before)


def test_without_credit_steps_are_merged(make_host) -> None:
    host = make_host()
    router = Router(host, epoch=1, credit=0)
    router.submit(1, 2, count=30)
    until(lambda: host.load.prompt_tokens == 6 and idle(host))
    assert router.attached.steps == []
    router.credit(1)
    router.attached.wait(lambda r: len(r.steps) == 1)
    step = router.attached.steps[0]
    assert step.steps >= 30
    assert {key: len(tokens) for key, tokens in router.attached.tokens.items()} == {1: 30, 2: 30}
    assert router.attached.finished.keys() == {1, 2}
    time.sleep(0.5)
    assert len(router.attached.steps) == 1  # not even a heartbeat


def test_a_cancel_ends_the_sequence_and_frees_its_blocks(make_host) -> None:
    host = make_host()
    router = Router(host, epoch=1)
    router.submit(1, 2, count=2000)
    router.attached.wait(lambda r: 1 in r.tokens)
    router.cancel(1, 77)
    finished = router.wait_finished(1)
    assert finished[1].reason == wire.FINISH_REASON_CANCELLED
    assert finished[1].output_tokens == len(router.attached.tokens[1])
    router.cancel(2)
    router.wait_finished(2)
    until(lambda: idle(host))


def test_routers_have_sequences_of_their_own(make_host) -> None:
    host = make_host()
    one, two = Router(host, 10, "one"), Router(host, 20, "two")
    one.submit(1, count=4)
    two.submit(1, count=9)
    one.wait_finished(1)
    two.wait_finished(1)
    assert len(one.attached.tokens[1]) == 4
    assert len(two.attached.tokens[1]) == 9
    two.submit(2, count=2000)
    two.attached.wait(lambda r: 2 in r.tokens)
    one.cancel(2)
    one.send(detach=wire.Detach(epoch=10))
    one.attached.wait(lambda r: r.is_finished)
    have = len(two.attached.tokens[2])
    two.attached.wait(lambda r: len(r.tokens[2]) > have)


def test_a_newer_epoch_replaces_the_older_and_cancels_its_sequences(make_host) -> None:
    host = make_host()
    old = Router(host, 1)
    old.submit(1, count=2000)
    old.attached.wait(lambda r: 1 in r.tokens)
    new = Router(host, 2)
    old.attached.wait(lambda r: r.is_finished)
    assert old.attached.finished[1].reason == wire.FINISH_REASON_CANCELLED
    until(lambda: idle(host))
    old.submit(5)  # of an epoch that is over: ignored
    new.submit(5, count=3)
    assert new.wait_finished(5)[5].output_tokens == 3
    assert old.attached.errors == []


def test_a_stale_or_foreign_epoch_is_refused(make_host) -> None:
    host = make_host()
    Router(host, 5, "one")
    for epoch, name in ((5, "one"), (4, "one"), (5, "two")):
        refused = Router(host, epoch, name).attached
        assert refused.frames[0].refused.code == "conflict"
        refused.wait(lambda r: r.is_finished)
        assert refused.errors == []


def test_sequences_of_a_dead_router_end_after_a_grace(make_host, monkeypatch) -> None:
    monkeypatch.setattr("replica.host_core.ORPHAN_GRACE_S", 0.3)
    host = make_host()
    router = Router(host, 1)
    router.submit(1, count=2000, ignore_eos=True)
    router.attached.wait(lambda r: 1 in r.tokens)
    router.attached.is_gone = True
    router.attached.wait(lambda r: r.is_finished)
    until(lambda: idle(host))
    assert router.attached.errors == []


def test_a_transport_that_raises_is_a_dead_router(make_host, monkeypatch) -> None:
    monkeypatch.setattr("replica.host_core.ORPHAN_GRACE_S", 0.0)
    host = make_host()
    router = Router(host, 1)
    router.submit(1, count=2000, ignore_eos=True)
    router.attached.wait(lambda r: 1 in r.tokens)

    def broken(frame: bytes) -> None:
        raise RuntimeError("the stream is gone")

    router.attached.send = broken
    router.attached.wait(lambda r: r.is_finished)
    until(lambda: idle(host))


def test_a_probe_runs_through_the_engine(make_host) -> None:
    host = make_host(sequences_max=1)
    router = Router(host, 1)
    router.submit(1, 2, count=2000, priority=2**32 - 1)
    router.attached.wait(lambda r: 1 in r.tokens)
    answer = router.send(probe=wire.Probe(prompt=[5, 6, 7], tokens=4))
    answer.wait(lambda r: r.is_finished)
    assert router.attached.finished == {}
    reply = answer.frames[0].probe
    assert len(reply.tokens) == 4
    assert (reply.engine, reply.base_digest) == ("sim", "base")
    assert reply.elapsed_us > 0
    assert answer.errors == []
    empty = router.send(probe=wire.Probe(prompt=[], tokens=1))
    empty.wait(lambda r: r.is_finished)
    assert empty.frames[0].refused.code == "invalid_request"


def test_probes_are_bounded(make_host) -> None:
    router = Router(make_host(cost_step_s=0.05), 1)
    answers = [router.send(probe=wire.Probe(prompt=[5], tokens=20)) for _ in range(PROBES_MAX + 1)]
    for answer in answers:
        answer.wait(lambda r: r.is_finished)
    assert [answer.frames[0].WhichOneof("kind") for answer in answers].count("refused") == 1
    assert answers[-1].frames[0].refused.code == "engine_busy"


def test_one_bad_sequence_fails_alone(make_host) -> None:
    router = Router(make_host(), 1)
    bad = wire.Sequence(id=1, prompt=[9999], output_tokens_max=5)
    good = wire.Sequence(id=2, prompt=[5], output_tokens_max=5)
    adapter = wire.Sequence(id=3, prompt=[5], output_tokens_max=5, adapter_digest="a" * 64)
    submit = wire.Submit(epoch=1, sequences=[bad, good, adapter])
    router.send(submit=submit)
    finished = router.wait_finished(1, 2, 3)
    assert finished[1].reason == finished[3].reason == wire.FINISH_REASON_REFUSED
    assert (finished[1].code, finished[3].code) == ("invalid_request", "unsupported_parameter")
    assert finished[2].reason == wire.FINISH_REASON_LENGTH


def test_a_repeated_submit_is_ignored_while_the_sequence_lives(make_host) -> None:
    router = Router(make_host(), 1)
    router.submit(1, count=50)
    router.submit(1, count=50)
    router.wait_finished(1)
    assert len(router.attached.tokens[1]) == 50


def test_garbage_and_empty_requests_are_refused(make_host) -> None:
    host = make_host()
    for payload in (b"\xff\xff", b""):
        responder = FakeResponder()
        host.handle(payload, responder)
        responder.wait(lambda r: r.is_finished)
        assert responder.frames[0].refused.code == "invalid_request"


def test_more_than_the_engine_keeps_is_busy(make_host) -> None:
    router = Router(make_host(waiting_max=2, sequences_max=1), 1)
    router.submit(*range(1, 6), count=400)
    finished = router.wait_finished(4, 5)
    assert finished.keys() == {4, 5}
    assert {f.reason for f in finished.values()} == {wire.FINISH_REASON_BUSY}
    assert finished[4].code == "engine_busy"


def test_more_than_the_inbox_holds_is_busy(make_host, monkeypatch) -> None:
    monkeypatch.setattr("replica.host.INBOX_SEQUENCES_MAX", 10)
    assert INBOX_SEQUENCES_MAX > 10
    router = Router(make_host(), 1)
    router.submit(*range(1, 12))
    finished = router.wait_finished(*range(1, 12))
    assert {f.code for f in finished.values()} == {"engine_busy"}


def test_a_drain_lets_running_sequences_end_and_takes_no_more(make_host) -> None:
    host = make_host(cost_step_s=0.02)
    router = Router(host, 1)
    router.submit(1, count=20)
    router.attached.wait(lambda r: 1 in r.tokens)
    closing = threading.Thread(target=host.close, args=(WAIT_S,))
    closing.start()
    until(lambda: host._core.is_draining)
    router.submit(2)
    finished = router.wait_finished(1, 2)
    closing.join(WAIT_S)
    assert finished[1].reason == wire.FINISH_REASON_LENGTH
    assert (finished[2].reason, finished[2].code) == (wire.FINISH_REASON_BUSY, "draining")
    assert router.attached.is_finished
    late = router.submit(3)
    late.wait(lambda r: bool(r.frames))
    assert late.frames[0].refused.code == "engine_failed"


def test_a_drain_that_takes_too_long_hands_sequences_back(make_host) -> None:
    host = make_host()
    router = Router(host, 1)
    router.submit(1, count=2000, ignore_eos=True)
    router.attached.wait(lambda r: 1 in r.tokens)
    host.close(0.0)
    finished = router.attached.finished[1]
    assert (finished.reason, finished.code) == (wire.FINISH_REASON_BUSY, "draining")


def test_a_bug_in_the_step_loop_ends_everything_audibly(make_host, monkeypatch) -> None:
    host = make_host()
    router = Router(host, 1)
    router.submit(1, count=2000)
    router.attached.wait(lambda r: 1 in r.tokens)
    monkeypatch.setattr(host._core, "step", lambda: 1 / 0)
    router.attached.wait(lambda r: r.is_finished)
    assert router.attached.finished[1].reason == wire.FINISH_REASON_FAILED
    answer = router.send(probe=wire.Probe(prompt=[5], tokens=1))
    answer.wait(lambda r: r.is_finished)
    assert "ZeroDivisionError" in answer.frames[0].refused.message


def test_a_failed_graph_call_is_retryable(make_host, monkeypatch) -> None:
    from replica.engine.plan import StepFailedError

    host = make_host()
    router = Router(host, 1)
    backend = host._core._driver._backend
    run = backend.run

    def fail_once(plan: object) -> list[int]:
        monkeypatch.setattr(backend, "run", run)
        raise StepFailedError("out of memory")

    monkeypatch.setattr(backend, "run", fail_once)
    router.submit(1)
    finished = router.wait_finished(1)[1]
    assert (finished.reason, finished.code) == (wire.FINISH_REASON_FAILED, "engine_failed")
    router.submit(2)
    assert router.wait_finished(2)[2].reason == wire.FINISH_REASON_LENGTH


def test_a_router_that_reads_nothing_is_detached(make_host, monkeypatch) -> None:
    monkeypatch.setattr("replica.host_frames.PENDING_TOKENS_MAX", 50)
    host = make_host()
    router = Router(host, 1, credit=0)
    router.submit(1, count=2000, ignore_eos=True)
    router.attached.wait(lambda r: r.is_finished)
    until(lambda: idle(host))


def test_a_late_router_learns_what_is_cached(make_host) -> None:
    host = make_host()
    first = Router(host, 1, "one")
    first.submit(1, prompt=[i % 400 for i in range(100)])
    first.wait_finished(1)
    stored = b"".join(step.kv_events.stored for step in first.attached.steps)
    assert len(stored) == 3 * 16
    late = Router(host, 2, "two")
    late.attached.wait(lambda r: len(r.steps) > 0)
    events = late.attached.steps[0].kv_events
    assert (events.reset, events.stored, events.number) == (True, stored, 3)
