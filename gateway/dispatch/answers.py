"""Advances all answers to one request on behalf of the coroutine that handles the request.

Router links pass tokens to generations synchronously, so that a token costs no task and no await.
The handling coroutine is woken only when an answer begins or ends. On waking, the coroutine
processes the events of all answers.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from gateway.dispatch.generation import EndKind, Generation, GenerationEnd
from gateway.dispatch.pursuit import STOPPING, Pursuit
from gateway.dispatch.retry_budget import RetryBudget
from gateway.dispatch.routers import RouterLinks


class Answers:
    """The answers to one request, which run while the `with` block runs.

    At most one coroutine waits at a time. The coroutine first awaits `begun`. It then calls
    `take_ended` after each `next_change`, until `is_over`. The first refused answer ends all other
    answers.

    Attributes:
        refusal: The refusal that ended the answers, or None while no answer was refused.
    """

    __slots__ = (
        *("_awaits_end", "_due", "_ended", "_generations", "_has_begun", "_links", "_change"),
        *("_on_close", "_per_prompt", "_pursuits", "_retries", "_woken", "refusal"),
    )

    def __init__(
        self,
        generations: Sequence[Generation],
        per_prompt: int,
        links: RouterLinks,
        retries: RetryBudget,
        on_close: Callable[["Answers"], None],
    ) -> None:
        """Store the arguments of `GatewayDispatcher.dispatch`. The `with` block submits answers."""
        self.refusal: GenerationEnd | None = None
        self._generations = generations
        self._per_prompt = per_prompt
        self._links = links
        self._retries = retries
        self._on_close = on_close
        self._has_begun = self._awaits_end = False
        # Further answers to a prompt, ready to submit because the prompt's first answer has begun.
        self._due: list[Generation] = []
        self._pursuits: list[Pursuit] = []
        self._woken: list[Pursuit] = []
        self._ended: list[Generation] = []
        self._change: asyncio.Future[None] | None = None

    @property
    def open(self) -> int:
        """Number of answers that have not ended."""
        return len(self._pursuits) + len(self._due) + sum(len(it.siblings) for it in self._pursuits)

    def __enter__(self) -> Self:
        """Submit the first answer to each prompt."""
        if self.refusal is None:
            generations, count = self._generations, self._per_prompt
            for place in range(0, len(generations), count):
                self._pursue(generations[place], [*generations[place + 1 : place + count]])
        self._generations = ()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel the answers that have not ended."""
        self._close()
        self._on_close(self)

    async def begun(self) -> GenerationEnd | None:
        """Wait until any answer has its first tokens, ends, or needs a keep-alive.

        Returns:
            None if the response to the client may begin, or the refusal if the request was refused
            before any token.
        """
        while not self._has_begun and self.refusal is None and self._pursuits:
            await self.next_change()
            self._look()
        return None if self._has_begun else self.refusal

    @property
    def is_over(self) -> bool:
        """Whether no further answer ends. Call `take_ended` before."""
        return not (self._pursuits or self._due)

    def take_ended(self) -> list[Generation]:
        """Process all events, and return the answers that have ended with success since then."""
        self._look()
        ended, self._ended = self._ended, []
        return ended

    async def finished(self) -> GenerationEnd | None:
        """Wait until all answers have ended, and return the refusal if an answer was refused."""
        self._awaits_end = True
        while self._pursuits or self._due:
            await self.next_change()
            self._look()
        return self.refusal

    def next_change(self) -> asyncio.Future[None]:
        """Submit the due answers, and return a future of the next event.

        This is no coroutine, because a coroutine would use memory in each stream.
        """
        for generation in self._due:
            self._pursue(generation, [])
        self._due.clear()
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._woken:
            change.set_result(None)
        else:
            self._change = change
        return change

    def stop(self) -> None:
        """End all running answers, because the process is about to exit."""
        for pursuit in self._pursuits:
            pursuit.generation.end(STOPPING)
            pursuit.on_routers_changed()

    def _pursue(self, generation: Generation, siblings: list[Generation]) -> None:
        pursuit = Pursuit(generation, siblings, self._links, self._retries, self._wake)
        self._pursuits.append(pursuit)
        generation.listener = partial(self._note, pursuit)
        pursuit.begin(asyncio.get_running_loop().time())

    def _note(self, pursuit: Pursuit) -> None:
        """Wake the waiter if it needs a generation's event: first tokens, an end or a nudge."""
        if not self._awaits_end or pursuit.siblings or pursuit.generation.ending is not None:
            self._wake(pursuit)

    def _wake(self, pursuit: Pursuit) -> None:
        self._woken.append(pursuit)
        news, self._change = self._change, None
        if news is not None and not news.done():
            news.set_result(None)

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        while self._woken:
            pursuit = self._woken.pop(0)
            if pursuit not in self._pursuits:
                continue  # the answer has ended since the wake
            final, generation = pursuit.look(now_s), pursuit.generation
            if generation.emitted or generation.was_nudged:
                self._has_begun = True
            if final is not None:
                pursuit.close()
                self._pursuits.remove(pursuit)
                if final.kind is EndKind.REFUSED:
                    self.refusal = final
                    self._close()
                    return
                self._ended.append(generation)
            if final is not None or generation.emitted:
                self._due += pursuit.siblings
                pursuit.siblings.clear()

    def _close(self) -> None:
        for pursuit in self._pursuits:
            pursuit.close()
        self._pursuits.clear()
        self._due.clear()
        self._woken.clear()
