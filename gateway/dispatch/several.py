"""Several answers to one request: when each is asked for, and what one refusal means for them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from gateway.dispatch.generation import Ending, EndKind, Generation

OnFirst = Callable[[], None]
OnEnd = Callable[[Generation, Ending], None]
# Runs one generation to its end: STOP, LENGTH or REFUSED.
Ask = Callable[[Generation, OnFirst], Awaitable[Ending]]


class SeveralAnswers:
    """Asks for all answers of one request; the first refusal ends the others.

    Further answers to a prompt are asked for when the first one has begun: by then an engine has
    the prompt in its prefix cache, and computes it only once.
    """

    def __init__(self, ask: Ask, on_first: OnFirst, on_end: OnEnd) -> None:
        """Prepare; see `Dispatcher.run_all` for the calls."""
        self._ask = ask
        self._on_first = on_first
        self._on_end = on_end
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
        def begin() -> None:
            if first.emitted:  # else it is a nudge
                self._start_all(others)
            self._on_first()

        await self._answer(first, begin)
        if self._refusal is None:
            self._start_all(others)

    async def _answer(self, generation: Generation, on_first: OnFirst) -> None:
        ending = await self._ask(generation, on_first)
        if ending.kind is not EndKind.REFUSED:
            self._on_end(generation, ending)
        elif self._refusal is None:
            self._refusal = ending
            for task in self._running:
                task.cancel()

    def _start_all(self, waiting: list[Generation]) -> None:
        for generation in waiting:
            self._start(self._answer(generation, self._on_first))
        waiting.clear()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._running.append(self._tasks.create_task(work))
