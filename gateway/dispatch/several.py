"""Several answers to one request: when each is asked for, and what one refusal means for them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from gateway.dispatch.asker import Asker
from gateway.dispatch.generation import Ending, Generation

# Runs one generation to its end; returns the refusal, or None.
Ask = Callable[[Generation, Asker], Awaitable[Ending | None]]


class SeveralAnswers:
    """Asks for all answers of one request; the first refusal ends the others.

    Further answers to a prompt are asked for when the first one has begun: by then an engine has
    the prompt in its prefix cache, and computes it only once.
    """

    def __init__(self, ask: Ask, asker: Asker) -> None:
        """Prepare; `asker` is who asked for all of them."""
        self._ask = ask
        self._asker = asker
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []
        self._refusal: Ending | None = None

    async def run(self, generations: Sequence[Generation], per_prompt: int) -> Ending | None:
        """Return the refusal, or None; `per_prompt` generations stand together for one prompt."""
        try:
            async with self._tasks:
                for place in range(0, len(generations), per_prompt):
                    first, *others = generations[place : place + per_prompt]
                    self._start(self._lead(first, others))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # a client that does not read, or a bug
        return self._refusal

    async def _lead(self, first: Generation, others: list[Generation]) -> None:
        await self._answer(first, _Leader(self._asker, first, lambda: self._start_all(others)))
        if self._refusal is None:
            self._start_all(others)

    async def _answer(self, generation: Generation, asker: Asker) -> None:
        refusal = await self._ask(generation, asker)
        if refusal is not None and self._refusal is None:
            self._refusal = refusal
            for task in self._running:
                task.cancel()

    def _start_all(self, waiting: list[Generation]) -> None:
        for generation in waiting:
            self._start(self._answer(generation, self._asker))
        waiting.clear()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._running.append(self._tasks.create_task(work))


class _Leader:
    """Passes on what is told of the first answer to a prompt; when it begins the others start."""

    def __init__(self, asker: Asker, first: Generation, start_others: Callable[[], None]) -> None:
        self.submitted, self.ended = asker.submitted, asker.ended
        self._asker = asker
        self._first = first
        self._start_others = start_others

    def begun(self) -> None:
        if self._first.emitted:  # else it is a nudge
            self._start_others()
        self._asker.begun()
