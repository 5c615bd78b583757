"""Tests answered requests, resumed streams and the watchdog with the host's real threads."""

import logging
import threading
from queue import SimpleQueue

import pytest

from replica.engine.types import EngineLoad
from replica.host import service
from replica.host.watchdog import StepWatch, Watchdog
from replica.host.workers import HostWorkers
from sluice.hashing import block_hashes
from sluice.wire.engine.v1 import engine_pb2 as wire

WAIT_S = 20.0
PROMPT = list(range(96))
HASHES = b"".join(block_hashes(PROMPT, b"r" * 16, 3))


def test_an_adapter_is_read_beside_the_steps(
    make_host, make_adapter, attach_router, monkeypatch
) -> None:
    host = make_host()
    digest = make_adapter("a")
    driver = host._core._driver
    reading, go_on = threading.Event(), threading.Event()
    read = driver.read_adapter

    def slowly(*args: object) -> object:
        reading.set()
        assert go_on.wait(WAIT_S)
        return read(*args)

    monkeypatch.setattr(driver, "read_adapter", slowly)
    router = attach_router(host, 1)
    router.submit(1, adapter_digest=digest)
    router.submit(2)
    assert reading.wait(WAIT_S)
    router.wait_finished(2)
    assert 1 not in router.attached.finished
    go_on.set()
    finished = router.wait_finished(1)
    assert finished[1].reason == wire.FINISH_REASON_LENGTH
    assert router.ask(adapters=wire.Adapters()).adapters.adapters[0].digest == digest


def test_adapters_are_warmed_and_dropped(
    make_host, make_adapter, attach_router, wait_until
) -> None:
    host = make_host()
    router = attach_router(host, 1)
    a, b = make_adapter("a"), make_adapter("b", "bad")
    answer = router.ask(adapters=wire.Adapters(load=[a, b])).adapters
    assert [info.digest for info in answer.adapters] == [a]
    assert [problem.code for problem in answer.problems] == ["adapter_invalid"]
    wait_until(lambda: [state.digest for state in host.adapters] == [a])
    assert list(router.ask(adapters=wire.Adapters(unload=[a])).adapters.adapters) == []


def test_blocks_travel(make_host, attach_router) -> None:
    one, two = attach_router(make_host(), 1), attach_router(make_host(), 1)
    one.submit(1, prompt=PROMPT)
    one.wait_finished(1)
    exported = one.ask(export_kv=wire.Export(hashes=HASHES)).exported
    assert exported.hashes == HASHES
    assert two.ask(import_kv=wire.Import(blocks=exported)).imported.blocks == 3
    two.attached.wait(lambda r: any(step.kv_events.stored == HASHES for step in r.steps))
    exported.data = exported.data[:-1] + b"?"
    assert two.ask(import_kv=wire.Import(blocks=exported)).refused.code == "invalid_request"


def test_a_cut_stream_is_resumed(make_host, attach_router, wait_until) -> None:
    host = make_host()
    old = attach_router(host, 1)
    old.submit(1, count=60)
    old.submit(2, count=3)
    old.wait_finished(2)
    old.attached.is_gone = True
    old.attached.wait(lambda r: r.is_finished)
    new = attach_router(host, 2, resumed=1)
    finished = new.wait_finished(1)
    assert finished[1].output_tokens == 60
    (resumed,) = [r for r in new.hello.resumed if r.sequence == 1]
    sent = old.attached.tokens[1]
    assert resumed.output[: len(sent)] == sent
    assert len(resumed.output) + len(new.attached.tokens.get(1, [])) == 60
    assert old.attached.errors == []


def test_an_attachment_that_still_lives_is_resumed_too(make_host, attach_router) -> None:
    host = make_host()
    old = attach_router(host, 1, credit=0)
    old.submit(1, count=2000)
    new = attach_router(host, 2, resumed=1)
    old.attached.wait(lambda r: r.is_finished)
    assert len(old.attached.frames) == 1
    new.attached.wait(lambda r: 1 in r.tokens)
    new.cancel(1)
    finished = new.wait_finished(1)
    total = len(new.hello.resumed[0].output) + len(new.attached.tokens[1])
    assert finished[1].output_tokens == total


def test_open_requests_are_bounded_by_kind(make_host, attach_router, monkeypatch) -> None:
    monkeypatch.setitem(service.ANSWERED_MAX, "adapters", 0)
    router = attach_router(make_host(), 1)
    assert router.ask(adapters=wire.Adapters()).refused.code == "engine_busy"
    assert router.ask(export_kv=wire.Export(hashes=HASHES)).HasField("exported")


def test_unread_bytes_are_bounded(make_host, attach_router, monkeypatch) -> None:
    router = attach_router(make_host(), 1)
    monkeypatch.setattr(service, "INBOX_BYTES_MAX", 100)
    answer = router.submit(1, prompt=[1] * 200)
    answer.wait(lambda r: r.is_finished)
    assert answer.frames[0].refused.code == "engine_busy"
    router.submit(2, prompt=[1] * 20)
    router.wait_finished(2)


def test_requests_open_at_the_end_are_answered(make_host, attach_router, make_responder) -> None:
    host = make_host()
    router = attach_router(host, 1)
    driver = host._core._driver
    stepping, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        stepping.set()
        assert go_on.wait(WAIT_S)
        raise ZeroDivisionError

    driver.on_step = hang
    router.submit(1)
    assert stepping.wait(WAIT_S)
    open_ = [
        router.send(probe=wire.Probe(prompt=[1], tokens=1)),
        router.send(adapters=wire.Adapters()),
        router.send(import_kv=wire.Import()),
        router.send(attach=wire.Attach(router_id="late", epoch=9)),
    ]
    go_on.set()
    for responder in open_:
        responder.wait(lambda r: r.is_finished)
        assert responder.frames[0].refused.code == "engine_failed"
        assert responder.errors == []
    assert router.wait_finished(1)[1].reason == wire.FINISH_REASON_FAILED


def test_two_routers_do_not_see_each_other(make_host, attach_router) -> None:
    host = make_host(step_s=0.002)
    one, two = attach_router(host, 10, "one"), attach_router(host, 20, "two")
    one.submit(*range(1, 6), count=30)
    two.submit(*range(1, 6), count=40)
    one.attached.is_gone = True
    one.attached.wait(lambda r: r.is_finished)
    again = attach_router(host, 11, "one", resumed=10)
    assert two.wait_finished(*range(1, 6))[5].output_tokens == 40
    assert {len(tokens) for tokens in two.attached.tokens.values()} == {40}
    again.wait_finished(*range(1, 6))
    for resumed in again.hello.resumed:
        rest = again.attached.tokens.get(resumed.sequence, [])
        assert len(resumed.output) + len(rest) == 30
    assert again.attached.steps[0].kv_events.reset
    assert two.attached.errors == one.attached.errors == []


def test_a_step_that_does_not_end_is_seen(make_host, attach_router) -> None:
    host = make_host()
    router = attach_router(host, 1)
    stepping, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        stepping.set()
        assert go_on.wait(WAIT_S)

    host._core._driver.on_step = hang
    router.submit(1)
    assert stepping.wait(WAIT_S)
    first = host.step_age_s
    assert host.step_age_s > first > 0
    go_on.set()
    router.wait_finished(1)


def test_the_watchdog_tells_the_size_of_a_stuck_step_once_per_doubling(caplog) -> None:
    now_s = [100.0]
    watch = StepWatch(lambda: now_s[0])
    assert watch.look()[0] == 0
    watch.begin(EngineLoad(running=7, waiting=3, prefill_tokens_owed=900, kv_blocks_used=42))
    told: list[str] = []
    watchdog = Watchdog(watch, stuck_s=10, look_s=0.001)
    with caplog.at_level(logging.ERROR, "replica.host.watchdog"):
        watchdog.start()
        for age_s in (5.0, 12.0, 20.0, 25.0):
            now_s[0] = 100.0 + age_s
            looks = threading.Event()
            original = watch.look

            def look(looks=looks, original=original):
                answer = original()
                looks.set()
                return answer

            watch.look = look
            for _ in range(2):  # the second check begins after the first has ended
                looks.clear()
                assert looks.wait(WAIT_S)
            watch.look = original
            told.append(str(len(caplog.records)))
        watchdog.close(WAIT_S)
    assert told == ["0", "1", "1", "2"]
    message = caplog.records[0].getMessage()
    assert "7 running and 3 waiting sequences, 900 prompt tokens" in message
    assert "12 s" in message
    watch.end()
    assert watch.look()[0] == 0


def test_workers_deliver_results_and_errors_and_refuse_too_much() -> None:
    delivered: list[object] = []
    arrived = threading.Semaphore(0)

    def deliver(action) -> None:
        action()
        arrived.release()

    go_on = threading.Event()
    workers = HostWorkers(deliver, threads=1, jobs_max=1)
    workers.start()
    begun = threading.Event()
    assert workers.run(lambda: (begun.set(), go_on.wait(WAIT_S)), lambda _: None)
    assert begun.wait(WAIT_S)
    assert workers.run(lambda: 1 // 0, delivered.append)
    assert not workers.run(lambda: 1, delivered.append)
    go_on.set()
    assert arrived.acquire(timeout=WAIT_S)
    assert arrived.acquire(timeout=WAIT_S)
    assert workers.run(lambda: 5, delivered.append)
    assert arrived.acquire(timeout=WAIT_S)
    assert isinstance(delivered[0], ZeroDivisionError)
    assert delivered[1] == 5
    workers.close(WAIT_S)
    assert not any(thread.is_alive() for thread in workers._threads)


class Panic(BaseException):
    """An exception like that of a panic in llguidance, which is no `Exception`."""


def panic() -> None:
    raise Panic("index out of bounds")


def test_a_panic_ends_a_job_and_not_its_worker() -> None:
    delivered: SimpleQueue[object] = SimpleQueue()
    workers = HostWorkers(lambda action: action(), threads=1, jobs_max=4)
    workers.start()
    assert workers.run(panic, delivered.put)
    assert workers.run(lambda: 5, delivered.put)
    outcome = delivered.get(timeout=WAIT_S)
    assert isinstance(outcome, Exception)
    assert "Panic: index out of bounds" in str(outcome)
    assert delivered.get(timeout=WAIT_S) == 5
    workers.close(WAIT_S)


@pytest.mark.parametrize("kind", ["credit", "cancel", "detach"])
def test_requests_for_an_epoch_that_is_over_do_no_harm(make_host, attach_router, kind) -> None:
    router = attach_router(make_host(), 5)
    message = {"credit": wire.Credit, "cancel": wire.Cancel, "detach": wire.Detach}[kind]
    answer = router.send(**{kind: message(epoch=99)})
    answer.wait(lambda r: r.is_finished)
    router.submit(1)
    router.wait_finished(1)
