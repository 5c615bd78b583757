"""A router confirms the frames of a working engine in time, and of an idle engine by number."""

import asyncio
from typing import Self

import pytest

from router.attach import CREDIT_FRAMES, Attachment
from router.core.router import RouterCore
from router.core.types.canary import CanaryAnswer
from router.core.types.config import CoreConfig
from router.core.types.plan import ReplicaPlan
from router.hub import Hub
from router.metrics import RouterMetrics
from sluice.detector.consensus import Text
from sluice.wire.engine.v1 import engine_pb2 as engine

LIMITS = engine.EngineLimits(
    context_tokens_max=100, sequences_max=4, step_tokens_max=64, kv_blocks=64, block_tokens=16
)


class Stream:
    """Answers an attach, and then sends frames with one step each, after one without a step."""

    def __init__(self, running: int) -> None:
        self._running = running
        self._received = 0
        self.credit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def open(self, *, timeout_s: float, is_patient: bool) -> None:
        pass

    async def send(self, request: engine.HostRequest) -> None:
        if request.HasField("credit") and not self.credit.done():
            self.credit.set_result(request.credit.frames)

    async def receive(self, timeout_s: float | None) -> engine.HostFrame | None:
        self._received += 1
        if self._received == 1:
            return engine.HostFrame(attached=engine.Attached(epoch=1, limits=LIMITS))
        await asyncio.sleep(0.01)
        steps = 0 if self._received == 2 else 1
        state = engine.EngineState(running=self._running, step_us=1000)
        return engine.HostFrame(step=engine.StepFrame(steps=steps, state=state))

    async def close(self, *, timeout_s: float) -> None:
        pass


@pytest.mark.parametrize("running", [0, 1], ids=["idle", "working"])
async def test_only_the_frames_of_a_working_engine_are_confirmed_in_time(running: int) -> None:
    hub = Hub(RouterCore(CoreConfig()), RouterMetrics())
    hub.plan(["cell"], [ReplicaPlan("replica", "cell")])
    stream = Stream(running)

    async def probe(timeout_s: float) -> CanaryAnswer:
        return CanaryAnswer(Text((1,)))

    attachment = Attachment(hub, "replica", lambda: stream, probe, router_id="r", silence_s=2.0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(attachment.run())
        frames = await stream.credit
        hub.close()
        run.cancel()
    if running:
        assert frames < CREDIT_FRAMES // 2
    else:
        assert frames == CREDIT_FRAMES // 2
