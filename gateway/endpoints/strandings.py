"""Requests that wait for a pool without replicas, while another model could answer at once."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence

from gateway.directory import Directory, Principal
from gateway.dispatch.generation import Ending, EndKind, Generation
from gateway.dispatch.routers import RouterLinks
from gateway.endpoints.task import Plan, Task
from gateway.server.deadlines import Deadlines
from sluice.errors import ErrorCode, PlatformError

# For how long a pool must have had no replica. A router that attaches them anew, or an engine that
# starts again at once, takes a second or two, and is better waited for.
PATIENCE_S = 3.0
_LOOK_S = 0.25
_STRANDED = Ending(
    EndKind.REFUSED, ErrorCode.NO_CAPACITY, "No replica is ready; try again later.", 2.0
)

Answers = Coroutine[None, None, Ending | None]


class _Waiting:
    def __init__(
        self,
        generations: Sequence[Generation],
        other_pool_id: str,
        may_leave: Callable[[], bool],
    ) -> None:
        self.generations = generations
        self.other_pool_id = other_pool_id
        self.may_leave = may_leave


class Strandings:
    """Those of one worker."""

    def __init__(self, directory: Directory, links: RouterLinks) -> None:
        """Prepare."""
        self._directory = directory
        self._links = links
        loop = asyncio.get_running_loop()
        self._looks: Deadlines[_Waiting] = Deadlines(_LOOK_S, loop, self._look)

    def other_pool(self, principal: Principal, task: Task, plan: Plan) -> str:
        """Return the pool of the model that may stand in; empty: none that fits may."""
        if not principal.tenant.fallbacks:
            return ""
        fields = task.fields
        name = self._directory.fallback(principal, fields.model)
        if name is None:
            return ""
        try:
            other = self._directory.resolve(
                principal, name, fields.session, plan.specs[0].request_id
            )
        except PlatformError:
            return ""
        longest = max([len(prompt.ids) for prompt in plan.prompts])
        fits = longest < (other.context_tokens_max or longest + 1)
        return other.model.pool_id if fits else ""

    async def watched(
        self,
        ask: Callable[[], Answers],
        generations: Sequence[Generation],
        other_pool_id: str,
        may_leave: Callable[[], bool],
    ) -> Ending | None:
        """Return what `ask` does, or a refusal as soon as nobody has been there for long.

        Args:
            ask: Gets the generations answered.
            generations: Of one request; one with tokens is stranded nowhere: it goes on.
            other_pool_id: Of the model that may stand in.
            may_leave: Whether it still may.
        """
        waiting = _Waiting(generations, other_pool_id, may_leave)
        if self._is_stranded(waiting):
            return _STRANDED
        self._looks.begin(waiting)
        try:
            return await ask()
        finally:
            self._looks.end(waiting)

    def _look(self, waiting: _Waiting) -> None:
        if any(it.emitted for it in waiting.generations):
            return
        if self._is_stranded(waiting):
            for generation in waiting.generations:
                generation.end(_STRANDED)
        self._looks.begin(waiting)

    def _is_stranded(self, waiting: _Waiting) -> bool:
        links, pool_id = self._links, waiting.generations[0].spec.pool_id
        return (
            links.absent_s(pool_id, time.monotonic()) >= PATIENCE_S
            and links.serves(waiting.other_pool_id)
            and waiting.may_leave()
        )
