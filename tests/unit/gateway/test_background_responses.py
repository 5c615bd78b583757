"""How long a response without a client goes on, decided by what other requests do with it."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.limits.valkey_commands import ValkeyDownError
from gateway.responses import background
from gateway.responses.background import BackgroundResponses, _Job
from gateway.responses.background_log import Beat

ALONE, READ, CANCELLED, DOWN = Beat(False, False), Beat(False, True), Beat(True, False), None
GRACE_S, STEP_S = 5.0, 4.0


class ScriptedLog:
    """A log whose beats each take `STEP_S` seconds of its own clock."""

    def __init__(self, beats: list[Beat | None]) -> None:
        self.beats, self.now_s = beats, 0.0
        self.written = b""

    def monotonic(self) -> float:
        return self.now_s

    async def beat(self, tenant_id: str, response_id: str, events: bytes) -> Beat:
        del tenant_id, response_id
        self.now_s += STEP_S
        told = self.beats.pop(0)
        if told is None:
            raise ValkeyDownError
        self.written += events
        return told


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_BEAT_S", 0.0)
    monkeypatch.setattr(background, "_BATCH_S", 0.0)


@pytest.mark.parametrize(
    ("beats", "grace_s"),
    [
        ([ALONE, ALONE], GRACE_S),
        ([READ, READ, READ, ALONE, ALONE], GRACE_S),
        ([ALONE, READ, ALONE, ALONE], GRACE_S),
        ([DOWN, DOWN], GRACE_S),
        ([ALONE] * 9 + [CANCELLED], math.inf),
        ([READ, CANCELLED], GRACE_S),
    ],
)
async def test_it_ends_when_no_request_reads_it_for_the_grace(
    monkeypatch: pytest.MonkeyPatch, beats: list[Beat | None], grace_s: float
) -> None:
    log = ScriptedLog([*beats, ALONE])
    monkeypatch.setattr(background, "time", log)
    store: Any = SimpleNamespace(background=log)
    keeping: Any = SimpleNamespace(place=("acme", "resp_1"), events=None)
    job = _Job(keeping, b"", is_begun=True)
    job.take(b"a")
    responses = BackgroundResponses(keeping, store, grace_s=grace_s)
    async with asyncio.timeout(60):
        assert await responses._follow(job, grace_s)
    assert log.beats == [ALONE], "not earlier, and not later"
    assert log.written == (b"" if DOWN in beats else b"a")


async def test_it_is_not_ended_early_once_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    log = ScriptedLog([])
    monkeypatch.setattr(background, "time", log)
    store: Any = SimpleNamespace(background=log)
    keeping: Any = SimpleNamespace(place=("acme", "resp_1"), events=None)
    job = _Job(keeping, b"", is_begun=True)
    job.end()
    assert not await BackgroundResponses(keeping, store, grace_s=0.0)._follow(job, 0.0)
