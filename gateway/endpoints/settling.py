"""Waits for the last verdicts on an answer before it ends."""

import asyncio

from gateway.dispatch.generation import Generation
from gateway.guard.judged_answer import JudgedAnswer

# Longest wait in seconds. It exceeds every classifier's timeout, so by then each has answered or
# failed.
_SETTLED_S_MAX = 60.0


async def settled(generation: Generation) -> None:
    """Wait until classifiers have judged the whole answer, if the answer has ended well."""
    guard = generation.guard
    if not isinstance(guard, JudgedAnswer):
        return
    generation.held_back()  # submits the last text for judgement
    if not guard.is_pending:
        return
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    guard.on_settled = lambda: over.done() or over.set_result(None)
    async with asyncio.timeout(_SETTLED_S_MAX):
        await over
