"""The loop of sweeps, which run at regular intervals, and at once on request."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from sqlalchemy.exc import DBAPIError

from control_plane.artifacts.sweep import Swept
from sluice.errors import PlatformError

log = structlog.get_logger(__name__)

_TIMEOUT_S = 600.0


class SweepLoop:
    """Runs sweeps one after the other. Concurrent requests share the next sweep."""

    def __init__(self, sweep: Callable[[], Awaitable[Swept]], interval_s: float) -> None:
        self._sweep = sweep
        self._interval_s = interval_s
        self._is_requested = asyncio.Event()
        self._next: asyncio.Future[Swept | None] | None = None

    async def run(self) -> None:
        """Run sweeps until cancelled."""
        while True:
            self._is_requested.clear()
            told, self._next = self._next, None
            swept = await self._step()
            if told is not None and not told.done():
                told.set_result(swept)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._is_requested.wait()
            except TimeoutError:
                pass

    async def request_sweep(self, wait_s: float) -> Swept | None:
        """Request a sweep that begins after this call, and return its result.

        The result is None if the sweep failed or did not end within `wait_s` seconds. A failed
        sweep is always repeated.
        """
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        self._is_requested.set()
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(self._next)
        except TimeoutError:
            return None

    async def _step(self) -> Swept | None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._sweep()
        except (PlatformError, DBAPIError, TimeoutError) as error:
            log.warning("artifact_sweep_failed", loop="artifact-sweep", error=repr(error))
            return None
