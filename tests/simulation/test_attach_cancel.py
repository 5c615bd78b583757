"""An attachment that is cancelled ends, also when its stream fails at the same moment."""

import asyncio

from router.attach import Attachment
from router.core.router import RouterCore
from router.core.types.canary import CanaryAnswer
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.hub import Hub
from router.metrics import RouterMetrics
from sim.engine import StepCost
from sim.host import SimHost, SimHostStream
from sim.loop import run
from sluice.detector.consensus import Text
from sluice.errors import ErrorCode, FailedError
from sluice.wire.engine.v1 import engine_pb2 as engine

LIMITS = EngineLimits(4096, 16, 256, 512, 16)


class FailsWhenCancelled(SimHostStream):
    """Its last word is an error: the cancellation meets a stream that is breaking."""

    async def receive(self, timeout_s: float | None) -> engine.HostFrame | None:
        try:
            return await super().receive(timeout_s)
        except asyncio.CancelledError:
            raise FailedError(ErrorCode.REPLICA_LOST, "broke just now") from None


async def no_probe(_: float) -> CanaryAnswer:
    return CanaryAnswer(Text(()))


def test_a_cancelled_attachment_ends_when_its_stream_breaks_at_that_moment():
    async def main() -> None:
        hub = Hub(RouterCore(CoreConfig()), RouterMetrics())
        hub.plan(["cell"], [ReplicaPlan("replica", "cell")])
        host = SimHost(LIMITS, StepCost())
        attachment = Attachment(
            hub,
            "replica",
            lambda: FailsWhenCancelled(host),
            no_probe,
            router_id="router",
            silence_s=1.0,
        )
        async with asyncio.TaskGroup() as tasks:
            engine_loop = tasks.create_task(host.run())
            task = tasks.create_task(attachment.run())
            await asyncio.sleep(0.1)
            assert attachment.is_attached
            task.cancel()
            await asyncio.wait([task], timeout=60)
            assert task.cancelled()
            assert not attachment.is_attached
            hub.close()
            engine_loop.cancel()

    run(main())
