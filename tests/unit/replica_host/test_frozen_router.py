"""Tests a router that reads frames without confirming them, so that its slots are freed."""

import pytest

from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as wire

STEP_S = 0.02
EVERY_MS = 250
SILENCE_S = 4 * EVERY_MS / 1000


def sequence(number: int, output: int = 1000) -> wire.Sequence:
    return wire.Sequence(id=number, prompt=[1, 2, 3], output_tokens_max=output, ignore_eos=True)


class Site:
    """A router that reads every frame and confirms as the test says, beside another router."""

    def __init__(self, bench, every_ms: int = EVERY_MS) -> None:
        self.bench = bench
        message = wire.Attach(router_id="r2", epoch=7, credit_frames=1000, credit_every_ms=every_ms)
        self.attachment, _ = bench.core.attach(message, 0.0)
        self.taken = 0
        self.ends: dict[int, wire.Finished] = {}
        bench.submit(sequence(1))
        bench.submit(sequence(1), sequence(2), epoch=7)

    def step(self, step_s: float = STEP_S) -> None:
        events = self.bench.core.step()
        self.bench.now_s += step_s
        self.bench.core.publish(events, self.bench.now_s)
        self.bench.attachment.outbox.take(0)
        news, _ = self.attachment.outbox.take(0)
        if news is not None:
            self.taken += 1
            self.ends |= {ended.finished.sequence: ended.finished for ended in news.ended}

    def steps(self, for_s: float, step_s: float = STEP_S) -> None:
        for _ in range(round(for_s / step_s)):
            self.step(step_s)

    def confirm(self) -> None:
        self.bench.core.credit(7, self.taken)
        self.taken = 0


def test_its_sequences_end_as_busy_and_it_may_go_on_with_others(make_bench) -> None:
    site = Site(make_bench())
    site.steps(SILENCE_S - 2 * STEP_S)
    assert not site.ends
    site.steps(4 * STEP_S)
    assert site.ends.keys() == {1, 2}
    for ended in site.ends.values():
        assert ended.reason == wire.FINISH_REASON_BUSY
        assert ended.code == ErrorCode.ENGINE_BUSY
        assert ended.output_tokens > 0
    assert len(site.bench.core.sequences) == 1, "the other router's goes on"
    site.confirm()
    site.bench.submit(sequence(3, output=5), epoch=7)
    site.steps(0.2)
    assert site.ends[3].reason == wire.FINISH_REASON_LENGTH


@pytest.mark.parametrize("step_s", [0.02, 0.4])
def test_one_that_confirms_is_left_alone(make_bench, step_s: float) -> None:
    site = Site(make_bench())
    for _ in range(20):
        site.steps(max(step_s, SILENCE_S - 0.1), step_s)
        site.confirm()
    assert not site.ends


def test_without_a_heartbeat_promise_no_router_is_taken_for_frozen(make_bench) -> None:
    site = Site(make_bench(), every_ms=0)
    site.steps(3 * SILENCE_S)
    assert not site.ends


def test_a_pause_of_the_engine_is_not_the_routers(make_bench) -> None:
    site = Site(make_bench())
    site.steps(0.1)
    site.step(10.0)
    site.confirm()
    site.steps(0.5)
    assert not site.ends


def test_heartbeats_need_no_answer(make_bench) -> None:
    bench = make_bench()
    site = Site(bench)
    bench.core.cancel(7, [1, 2])
    bench.core.cancel(1, [1])
    site.step()
    site.confirm()
    site.steps(5.0, 0.2)
    bench.submit(sequence(5), epoch=7)
    site.steps(0.5)
    assert 5 not in site.ends
