"""Sweeps run regularly, and at once when somebody asks; a failed one is no end."""

import asyncio

from control_plane.artifacts.garbage import GarbageDecision
from control_plane.artifacts.sweep import Swept
from control_plane.artifacts.sweeping import SweepLoop
from sluice.errors import ErrorCode, PlatformError

PATIENCE_S = 60.0


class Sweeps:
    """Counts sweeps; fails when told so, and waits for leave when it is closed."""

    def __init__(self) -> None:
        self.count = 0
        self.is_broken = False
        self.begun = asyncio.Event()
        self.leave = asyncio.Event()
        self.leave.set()

    async def __call__(self) -> Swept:
        self.count += 1
        self.begun.set()
        await self.leave.wait()
        if self.is_broken:
            raise PlatformError(ErrorCode.UNAVAILABLE, "gone")
        return Swept(GarbageDecision(), self.count)


async def test_a_request_gets_a_sweep_that_began_after_it() -> None:
    sweeps = Sweeps()
    loop = SweepLoop(sweeps, 3600)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(loop.run())
        swept = await loop.request_sweep(PATIENCE_S)
        assert swept is not None
        sweeps.leave.clear()
        sweeps.begun.clear()
        before = sweeps.count
        first = tasks.create_task(loop.request_sweep(PATIENCE_S))
        await sweeps.begun.wait()
        others = [tasks.create_task(loop.request_sweep(PATIENCE_S)) for _ in range(3)]
        await asyncio.sleep(0)
        sweeps.leave.set()
        assert await first == Swept(GarbageDecision(), before + 1)
        assert [await other for other in others] == [Swept(GarbageDecision(), before + 2)] * 3
        running.cancel()


async def test_a_sweep_that_fails_or_takes_long_is_told_as_none() -> None:
    sweeps = Sweeps()
    loop = SweepLoop(sweeps, 3600)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(loop.run())
        sweeps.is_broken = True
        assert await loop.request_sweep(PATIENCE_S) is None
        sweeps.is_broken = False
        sweeps.leave.clear()
        assert await loop.request_sweep(0.0) is None
        sweeps.leave.set()
        assert await loop.request_sweep(PATIENCE_S) is not None
        running.cancel()
