"""Tests engines that sleep and wake, with the host's real threads and the driver `sim`."""

import threading
from collections.abc import Iterator

import pytest

from replica.drivers.sim import load_sim
from replica.host import EngineHost
from sluice.wire.engine.v1 import engine_pb2 as wire

PROMPT = list(range(300))


@pytest.fixture
def host() -> Iterator[EngineHost]:
    driver = load_sim(None, "b" * 64, {"blocks": 64, "wake_s": 0.01})
    host = EngineHost(driver, "b" * 64)
    host.start()
    yield host
    host.close(0.0)


def _rest(router, *, is_asleep: bool) -> wire.HostFrame:
    return router.ask(rest=wire.Rest(is_asleep=is_asleep))


def test_a_sleeping_engine_answers_short_probes_and_turns_work_away_until_it_woke(
    host, attach_router, wait_until
) -> None:
    router = attach_router(host, 1)
    router.submit(1, prompt=PROMPT)
    router.wait_finished(1)
    assert _rest(router, is_asleep=True).rested.is_asleep
    assert _rest(router, is_asleep=True).rested.is_asleep
    assert len(router.ask(probe=wire.Probe(prompt=[1, 2], tokens=1)).probe.tokens) == 1
    router.submit(2, prompt=PROMPT)
    assert router.wait_finished(2)[2].reason == wire.FINISH_REASON_BUSY
    assert not _rest(router, is_asleep=False).rested.is_asleep
    router.submit(3, prompt=PROMPT)
    assert router.wait_finished(3)[3].reason == wire.FINISH_REASON_LENGTH


def test_the_memory_is_taken_beside_the_steps(host, attach_router, monkeypatch) -> None:
    router = attach_router(host, 1)
    assert _rest(router, is_asleep=True).rested.is_asleep
    driver, go_on = host._core._driver, threading.Event()
    restored = driver.restored

    def slowly() -> object:
        assert go_on.wait(20.0)
        return restored()

    monkeypatch.setattr(type(driver), "restored", lambda _: slowly())
    waking = router.send(rest=wire.Rest(is_asleep=False))
    assert router.ask(probe=wire.Probe(prompt=[1], tokens=1)).HasField("probe")
    assert not waking.is_finished
    go_on.set()
    waking.wait(lambda it: it.is_finished)
    assert not waking.frames[0].rested.is_asleep


def test_an_engine_that_cannot_sleep_says_so(make_host, attach_router) -> None:
    refused = _rest(attach_router(make_host(), 1), is_asleep=True).refused
    assert refused.code == "unsupported_parameter"
    assert "cannot sleep" in refused.message


def test_an_engine_that_holds_sequences_stays_awake(host, attach_router) -> None:
    router = attach_router(host, 1)
    router.submit(1, count=1500, ignore_eos=True)
    assert _rest(router, is_asleep=True).refused.code == "engine_busy"
