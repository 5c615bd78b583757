"""Waiting for what has no event."""

import asyncio
from collections.abc import Callable


async def until(check: Callable[[], object], *, timeout_s: float = 60.0) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(timeout_s):
        while not check():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.005)
