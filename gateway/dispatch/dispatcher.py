"""Submits this worker's requests to routers, and counts the requests that have not ended."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from gateway.dispatch.answers import Answers
from gateway.dispatch.generation import EndKind, Generation, GenerationEnd
from gateway.dispatch.retry_budget import RetryBudget
from gateway.dispatch.routers import RouterLinks
from gateway.dispatch.tier_gate import GateAsk
from gateway.stopping import STOPPING_RETRY_S, STOPPING_TEXT
from sluice.errors import ErrorCode

_DRAINING = GenerationEnd(EndKind.REFUSED, ErrorCode.DRAINING, STOPPING_TEXT, STOPPING_RETRY_S)


class GatewayDispatcher:
    """Begins, drains and stops a worker's requests. `Answers` carries out each request."""

    def __init__(self, links: RouterLinks) -> None:
        self._links = links
        self._retries = RetryBudget()
        self._open: set[Answers] = set()
        self._idle = asyncio.Event()
        self._on_close = self._close  # shared, because a bound method uses 64 bytes in each stream
        self.is_draining = False

    @property
    def open(self) -> int:
        """Number of generations that run, or wait for another answer to their prompt to begin."""
        return sum(answers.open for answers in self._open)

    @property
    def retries_refused(self) -> int:
        """Number of retries that the retry budget has refused."""
        return self._retries.refused

    def serves(self, pool_id: str) -> bool:
        """Return whether a replica of the pool accepts requests."""
        return self._links.serves(pool_id)

    @property
    def is_gated(self) -> bool:
        """Whether any router refuses most requests of a tier."""
        return self._links.is_gated

    def refused_for_s(self, pool_id: str, ask: GateAsk, now_s: float) -> float | None:
        """Return the seconds for which a pool's routers refuse a request because of their gates.

        None means that a router accepts the request, or that no router is connected.
        """
        return self._links.refused_for_s(pool_id, ask, now_s)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait until the open requests end, for at most `timeout_s`.

        Returns:
            The number of generations that are still open.
        """
        self.is_draining = True
        if self._open:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        return self.open

    def stop_all(self) -> None:
        """End all running and later requests, because the process is about to exit."""
        self._links.stop()
        for answers in tuple(self._open):
            answers.stop()

    def dispatch(self, generations: Sequence[Generation], answers_per_prompt: int) -> Answers:
        """Return the answers to one request. Entering their `with` block submits the request.

        Args:
            generations: Generations that receive the answers. Answers to one prompt are adjacent.
            answers_per_prompt: Number of answers to each prompt.
        """
        answers = Answers(
            generations, answers_per_prompt, self._links, self._retries, self._on_close
        )
        if self.is_draining:
            answers.refusal = _DRAINING
        self._open.add(answers)
        return answers

    def _close(self, answers: Answers) -> None:
        self._open.discard(answers)
        if not self._open:
            self._idle.set()
