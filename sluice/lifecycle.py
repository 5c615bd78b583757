"""The lifecycle of services, with background loops that have an owner, and stop signals.

This module is independent of any service. Background tasks run only inside an `asyncio.TaskGroup`.
An unexpected error ends the group, and so the process, which its supervisor then restarts.
"""

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

log = structlog.get_logger(__name__)


async def run_every(
    interval_s: float,
    step: Callable[[], Awaitable[object]],
    *,
    name: str,
    expected: tuple[type[Exception], ...],
    step_timeout_s: float,
) -> None:
    """Run `step` every `interval_s` seconds until cancelled.

    Intervals are measured from the start of each step. A slow step delays the next step, and missed
    steps are dropped, not queued. If a step raises an `expected` error or exceeds `step_timeout_s`,
    the error is logged and the loop continues. Any other error ends the loop and its `TaskGroup`.
    """
    loop = asyncio.get_running_loop()
    next_at = loop.time()
    while True:
        try:
            async with asyncio.timeout(step_timeout_s):
                await step()
        except (*expected, TimeoutError) as error:
            log.warning("loop_step_failed", loop=name, error=repr(error))
        next_at = max(next_at + interval_s, loop.time())
        await asyncio.sleep(next_at - loop.time())


@asynccontextmanager
async def stop_signals() -> AsyncGenerator[asyncio.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets. A second signal kills the process."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)

    def request_stop() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, request_stop)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def backoff_s(attempt: int, *, first_s: float, max_s: float) -> float:
    """Return the pause before retry number `attempt`, from 0, which doubles up to `max_s`."""
    return min(max_s, first_s * 2.0 ** min(attempt, 32))
