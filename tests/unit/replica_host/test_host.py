"""Tests the host with its real threads and the real clock. No test depends on exact times."""

import threading
import time

import pytest

from replica.host.service import ANSWERED_MAX, INBOX_SEQUENCES_MAX
from sluice.wire.engine.v1 import engine_pb2 as wire

WAIT_S = 20.0


def idle(host) -> bool:
    load = host.load
    return (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)


def test_attach_submit_and_the_end_of_everything(make_host, attach_router) -> None:
    router = attach_router(make_host(), epoch=3)
    attached = router.attached.frames[0].attached
    assert (attached.epoch, attached.limits.engine, attached.limits.base_digest) == (
        3,
        "fake",
        "base",
    )
    assert (attached.limits.block_tokens, attached.limits.context_tokens_max) == (32, 4096)
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


def test_an_idle_engine_sends_signs_of_life(make_host, attach_router) -> None:
    router = attach_router(make_host(), epoch=1)
    router.attached.wait(lambda r: len(r.steps) >= 3)
    assert router.attached.steps[0].kv_events.reset
    assert all(not step.sequence for step in router.attached.steps)


def test_a_frozen_step_loop_gives_no_sign_of_life(make_host, monkeypatch, attach_router) -> None:
    host = make_host()
    router = attach_router(host, epoch=1)
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


def test_without_credit_steps_are_merged(make_host, attach_router, wait_until) -> None:
    host = make_host()
    router = attach_router(host, epoch=1, credit=0)
    router.submit(1, 2, count=30)
    wait_until(lambda: host.counters.output_tokens == 60 and idle(host))
    assert router.attached.steps == []
    router.credit(1)
    router.attached.wait(lambda r: len(r.steps) == 1)
    step = router.attached.steps[0]
    assert step.steps >= 30
    assert {key: len(tokens) for key, tokens in router.attached.tokens.items()} == {1: 30, 2: 30}
    assert router.attached.finished.keys() == {1, 2}
    time.sleep(0.5)
    # the router received no further frame, not even a heartbeat
    assert len(router.attached.steps) == 1


def test_a_cancel_ends_the_sequence_and_frees_its_blocks(
    make_host, attach_router, wait_until
) -> None:
    host = make_host()
    router = attach_router(host, epoch=1)
    router.submit(1, 2, count=2000)
    router.attached.wait(lambda r: 1 in r.tokens)
    router.cancel(1, 77)
    finished = router.wait_finished(1)
    assert finished[1].reason == wire.FINISH_REASON_CANCELLED
    assert finished[1].output_tokens == len(router.attached.tokens[1])
    router.cancel(2)
    router.wait_finished(2)
    wait_until(lambda: idle(host))


def test_routers_have_sequences_of_their_own(make_host, attach_router) -> None:
    host = make_host()
    one, two = attach_router(host, 10, "one"), attach_router(host, 20, "two")
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


def test_a_newer_epoch_replaces_the_older_and_cancels_its_sequences(
    make_host, attach_router, wait_until
) -> None:
    host = make_host()
    old = attach_router(host, 1)
    old.submit(1, count=2000)
    old.attached.wait(lambda r: 1 in r.tokens)
    new = attach_router(host, 2)
    old.attached.wait(lambda r: r.is_finished)
    assert old.attached.finished[1].reason == wire.FINISH_REASON_CANCELLED
    wait_until(lambda: idle(host))
    old.submit(5)  # the epoch is over, so the sequence is ignored
    new.submit(5, count=3)
    assert new.wait_finished(5)[5].output_tokens == 3
    assert old.attached.errors == []


def test_a_stale_or_foreign_epoch_is_refused(make_host, attach_router) -> None:
    host = make_host()
    attach_router(host, 5, "one")
    for epoch, name in ((5, "one"), (4, "one"), (5, "two")):
        refused = attach_router(host, epoch, name).attached
        assert refused.frames[0].refused.code == "conflict"
        refused.wait(lambda r: r.is_finished)
        assert refused.errors == []


def test_sequences_of_a_dead_router_end_after_a_grace(
    make_host, monkeypatch, attach_router, wait_until
) -> None:
    monkeypatch.setattr("replica.host.core.ORPHAN_GRACE_S", 0.3)
    host = make_host()
    router = attach_router(host, 1)
    router.submit(1, count=2000, ignore_eos=True)
    router.attached.wait(lambda r: 1 in r.tokens)
    router.attached.is_gone = True
    router.attached.wait(lambda r: r.is_finished)
    wait_until(lambda: idle(host))
    assert router.attached.errors == []


def test_a_transport_that_raises_is_a_dead_router(
    make_host, monkeypatch, attach_router, wait_until
) -> None:
    monkeypatch.setattr("replica.host.core.ORPHAN_GRACE_S", 0.0)
    host = make_host()
    router = attach_router(host, 1)
    router.submit(1, count=2000, ignore_eos=True)
    router.attached.wait(lambda r: 1 in r.tokens)

    def broken(frame: bytes) -> None:
        raise RuntimeError("the stream is gone")

    router.attached.send = broken
    router.attached.wait(lambda r: r.is_finished)
    wait_until(lambda: idle(host))


def test_a_probe_runs_through_the_engine(make_host, attach_router) -> None:
    host = make_host(sequences_max=1)
    router = attach_router(host, 1)
    router.submit(1, 2, count=2000, priority=2**32 - 1)
    router.attached.wait(lambda r: 1 in r.tokens)
    answer = router.send(probe=wire.Probe(prompt=[5, 6, 7], tokens=4))
    answer.wait(lambda r: r.is_finished)
    assert router.attached.finished == {}
    reply = answer.frames[0].probe
    assert len(reply.tokens) == 4
    assert (reply.engine, reply.base_digest) == ("fake", "base")
    assert reply.elapsed_us > 0
    assert answer.errors == []
    empty = router.send(probe=wire.Probe(prompt=[], tokens=1))
    empty.wait(lambda r: r.is_finished)
    assert empty.frames[0].refused.code == "invalid_request"


def test_probes_are_bounded(make_host, attach_router) -> None:
    router = attach_router(make_host(step_s=0.05), 1)
    answers = [
        router.send(probe=wire.Probe(prompt=[5], tokens=20))
        for _ in range(ANSWERED_MAX["probe"] + 1)
    ]
    for answer in answers:
        answer.wait(lambda r: r.is_finished)
    assert [answer.frames[0].WhichOneof("kind") for answer in answers].count("refused") == 1
    assert answers[-1].frames[0].refused.code == "engine_busy"


def test_one_bad_sequence_fails_alone(make_host, attach_router) -> None:
    router = attach_router(make_host(), 1)
    bad = wire.Sequence(id=1, prompt=[9999], output_tokens_max=5)
    good = wire.Sequence(id=2, prompt=[5], output_tokens_max=5)
    adapter = wire.Sequence(id=3, prompt=[5], output_tokens_max=5, adapter_digest="a" * 64)
    submit = wire.Submit(epoch=1, sequences=[bad, good, adapter])
    router.send(submit=submit)
    finished = router.wait_finished(1, 2, 3)
    assert finished[1].reason == finished[3].reason == wire.FINISH_REASON_REFUSED
    assert (finished[1].code, finished[3].code) == ("invalid_request", "adapter_not_found")
    assert finished[2].reason == wire.FINISH_REASON_LENGTH


def test_a_repeated_submit_is_ignored_while_the_sequence_lives(make_host, attach_router) -> None:
    router = attach_router(make_host(), 1)
    router.submit(1, count=50)
    router.submit(1, count=50)
    router.wait_finished(1)
    assert len(router.attached.tokens[1]) == 50


def test_garbage_and_empty_requests_are_refused(make_host, make_responder) -> None:
    host = make_host()
    for payload in (b"\xff\xff", b""):
        responder = make_responder()
        host.handle(payload, responder)
        responder.wait(lambda r: r.is_finished)
        assert responder.frames[0].refused.code == "invalid_request"


def test_more_than_the_engine_keeps_is_busy(make_host, attach_router) -> None:
    router = attach_router(make_host(waiting_max=2, sequences_max=1), 1)
    router.submit(*range(1, 6), count=400)
    finished = router.wait_finished(4, 5)
    assert finished.keys() == {4, 5}
    assert {f.reason for f in finished.values()} == {wire.FINISH_REASON_BUSY}
    assert finished[4].code == "engine_busy"


def test_more_than_the_inbox_holds_is_busy(make_host, monkeypatch, attach_router) -> None:
    monkeypatch.setattr("replica.host.service.INBOX_SEQUENCES_MAX", 10)
    assert INBOX_SEQUENCES_MAX > 10
    router = attach_router(make_host(), 1)
    router.submit(*range(1, 12), forks=[wire.Fork(id=99)])
    finished = router.wait_finished(*range(1, 12), 99)
    assert {f.code for f in finished.values()} == {"engine_busy"}


def test_a_drain_lets_running_sequences_end_and_takes_no_more(
    make_host, attach_router, wait_until
) -> None:
    host = make_host(step_s=0.02)
    router = attach_router(host, 1)
    router.submit(1, count=20)
    router.attached.wait(lambda r: 1 in r.tokens)
    closing = threading.Thread(target=host.close, args=(WAIT_S,))
    closing.start()
    wait_until(lambda: host._core.sequences.is_draining)
    router.submit(2)
    finished = router.wait_finished(1, 2)
    closing.join(WAIT_S)
    assert finished[1].reason == wire.FINISH_REASON_LENGTH
    assert (finished[2].reason, finished[2].code) == (wire.FINISH_REASON_BUSY, "draining")
    assert router.attached.is_finished
    late = router.submit(3)
    late.wait(lambda r: bool(r.frames))
    assert late.frames[0].refused.code == "engine_failed"


def test_a_drain_that_takes_too_long_hands_sequences_back(make_host, attach_router) -> None:
    host = make_host()
    router = attach_router(host, 1)
    router.submit(1, count=2000, ignore_eos=True)
    router.attached.wait(lambda r: 1 in r.tokens)
    host.close(0.0)
    finished = router.attached.finished[1]
    assert (finished.reason, finished.code) == (wire.FINISH_REASON_BUSY, "draining")


class Panic(BaseException):
    """An exception like that of a panic in llguidance, which is no `Exception`."""


@pytest.mark.parametrize("bug", [ZeroDivisionError, MemoryError, Panic])
def test_a_bug_in_the_step_loop_ends_everything_audibly(
    make_host, monkeypatch, attach_router, bug: type[BaseException]
) -> None:
    def fail() -> None:
        raise bug

    host = make_host()
    router = attach_router(host, 1)
    router.submit(1, count=2000)
    router.attached.wait(lambda r: 1 in r.tokens)
    monkeypatch.setattr(host._core, "step", fail)
    router.attached.wait(lambda r: r.is_finished)
    assert router.attached.finished[1].reason == wire.FINISH_REASON_FAILED
    answer = router.send(probe=wire.Probe(prompt=[5], tokens=1))
    answer.wait(lambda r: r.is_finished)
    assert bug.__name__ in answer.frames[0].refused.message


def test_a_router_that_reads_nothing_is_detached(
    make_host, monkeypatch, attach_router, wait_until
) -> None:
    monkeypatch.setattr("replica.host.news.PENDING_ENTRIES_MAX", 50)
    host = make_host()
    router = attach_router(host, 1, credit=0)
    router.submit(1, count=2000, ignore_eos=True)
    router.attached.wait(lambda r: r.is_finished)
    wait_until(lambda: idle(host))


def test_a_late_router_learns_the_cached_blocks(make_host, attach_router) -> None:
    host = make_host()
    first = attach_router(host, 1, "one")
    first.submit(1, prompt=[i % 400 for i in range(100)])
    first.wait_finished(1)
    stored = b"".join(step.kv_events.stored for step in first.attached.steps)
    assert len(stored) == 3 * 16
    late = attach_router(host, 2, "two")
    late.attached.wait(lambda r: len(r.steps) > 0)
    events = late.attached.steps[0].kv_events
    assert (events.reset, events.stored, events.number) == (True, stored, 3)
