"""Asks routers for the answers of this worker's requests, and knows which of them are open."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from gateway.dispatch.answers import Answers
from gateway.dispatch.generation import EndKind, Generation, GenerationEnd
from gateway.dispatch.retry_budget import RetryBudget
from gateway.dispatch.routers import RouterLinks
from gateway.stopping import STOPPING_RETRY_S, STOPPING_TEXT
from sluice.errors import ErrorCode

_DRAINING = GenerationEnd(EndKind.REFUSED, ErrorCode.DRAINING, STOPPING_TEXT, STOPPING_RETRY_S)


class GatewayDispatcher:
    """Begins, drains and stops; between begin and end `Answers` does without it."""

    def __init__(self, links: RouterLinks) -> None:
        """Prepare."""
        self._links = links
        self._retries = RetryBudget()
        self._open: set[Answers] = set()
        self._idle = asyncio.Event()
        self.is_draining = False

    @property
    def open(self) -> int:
        """How many generations run, or wait until another one has begun."""
        return sum(answers.open for answers in self._open)

    @property
    def retries_refused(self) -> int:
        """How many retries were refused because too much was tried again already."""
        return self._retries.refused

    def serves(self, pool_id: str) -> bool:
        """Return whether a replica of the pool takes requests."""
        return self._links.serves(pool_id)

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, wait for what runs; return how many are left when time is up."""
        self.is_draining = True
        if self._open:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        return self.open

    def stop_all(self) -> None:
        """End everything that still runs, and whatever comes: the process is about to exit."""
        self._links.stop()
        for answers in tuple(self._open):
            answers.stop()

    def ask(self, generations: Sequence[Generation], answers_per_prompt: int) -> Answers:
        """Return the answers to one request; they are asked for when its `with` block begins.

        Args:
            generations: They are told everything; those of one prompt stand together.
            answers_per_prompt: How many those are.
        """
        answers = Answers(generations, answers_per_prompt, self._links, self._retries, self._close)
        if self.is_draining:
            answers.refusal = _DRAINING
        self._open.add(answers)
        return answers

    def _close(self, answers: Answers) -> None:
        self._open.discard(answers)
        if not self._open:
            self._idle.set()
