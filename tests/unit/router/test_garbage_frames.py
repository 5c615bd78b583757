"""An engine host that sends nonsense costs itself, never the router."""

import asyncio
from collections.abc import Iterator
from typing import Self

import pytest

from router.attach import Attachment
from router.core import invariants
from router.core.router import RouterCore
from router.core.types.canary import CanaryAnswer
from router.core.types.config import CoreConfig
from router.core.types.plan import ReplicaPlan
from router.hub import Hub
from router.metrics import RouterMetrics
from sluice.detector.consensus import Text
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

LIMITS = engine.EngineLimits(
    context_tokens_max=100, sequences_max=4, step_tokens_max=64, kv_blocks=64, block_tokens=16
)


class Stream:
    """Answers an attach, then says what it was given, then is silent."""

    def __init__(self, limits: engine.EngineLimits, frames: Iterator[engine.StepFrame]) -> None:
        self._limits = limits
        self._frames = frames
        self._is_attached = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def open(self, *, timeout_s: float, is_patient: bool) -> None:
        pass

    async def send(self, request: engine.HostRequest) -> None:
        pass

    async def receive(self, timeout_s: float | None) -> engine.HostFrame | None:
        if not self._is_attached:
            self._is_attached = True
            return engine.HostFrame(attached=engine.Attached(epoch=1, limits=self._limits))
        await asyncio.sleep(0.01)
        frame = next(self._frames, None)
        return engine.HostFrame(step=frame or engine.StepFrame())

    async def close(self, *, timeout_s: float) -> None:
        pass


@pytest.mark.parametrize(
    "frame",
    [
        engine.StepFrame(sequence=[1, 2], count=[1], token=[7]),
        engine.StepFrame(sequence=[1], count=[1], token=[7, 8]),
        engine.StepFrame(sequence=[1], count=[4_000_000_000], token=[7]),
        engine.StepFrame(count=[1], token=[7]),
    ],
    ids=["more sequences than counts", "more tokens", "fewer tokens", "no sequences"],
)
async def test_columns_that_do_not_agree_end_the_attachment(frame: engine.StepFrame) -> None:
    hub, attached = await attach_twice(LIMITS, frame)
    assert attached == 2
    [gateway] = hub.core.gateways.values()
    batch = gateway.batch
    assert sum(batch.counts) == len(batch.tokens)
    assert gateway.requests.keys() == {1}, "the request waits for a sane replica"


@pytest.mark.parametrize("name", ["context_tokens_max", "step_tokens_max", "block_tokens"])
async def test_limits_of_nothing_are_refused(name: str) -> None:
    limits = engine.EngineLimits()
    limits.CopyFrom(LIMITS)
    limits.ClearField(name)
    hub, attached = await attach_twice(limits, engine.StepFrame())
    assert attached == 2
    assert not hub.core.cells["cell"].fleet.ready()


async def attach_twice(limits: engine.EngineLimits, frame: engine.StepFrame) -> tuple[Hub, int]:
    """Run an attachment with a request until it attaches again; return how often it did."""
    hub = Hub(RouterCore(CoreConfig()), RouterMetrics())
    hub.plan(["cell"], [ReplicaPlan("replica", "cell")])
    link = hub.connect("gateway")
    submit = wire.Submit(handle=1, cell_id="cell", prompt=[1], output_tokens_max=5)
    hub.request(link, wire.ConnectRequest(submits=[submit]))
    opened = 0

    def open_stream() -> Stream:
        nonlocal opened
        opened += 1
        return Stream(limits, iter([frame] if opened == 1 else []))

    async def probe(timeout_s: float) -> CanaryAnswer:
        return CanaryAnswer(Text((1,)))

    attachment = Attachment(hub, "replica", open_stream, probe, router_id="r", silence_s=2.0)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(attachment.run())
        while opened < 2 and not run.done():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)
        hub.close()
        run.cancel()
    invariants.check(hub.core)
    return hub, opened
