"""A driver made of the scheduler and a backend that computes steps.

What differs between engines is the backend: it gets a plan and returns one token per sampled
sequence. A backend that fails ends the sequences of that step, and nothing else.
"""

from collections.abc import Callable

from replica.engine.plan import Backend, StepFailedError
from replica.engine.scheduler import Scheduler
from replica.engine.types import EngineLoad, Limits, SequenceRequest, StepEvents


class ScheduledEngine:
    """The `Driver` of every engine that leaves scheduling to us."""

    def __init__(
        self, name: str, scheduler: Scheduler, backend: Backend, clock: Callable[[], float]
    ) -> None:
        self._name = name
        self._scheduler = scheduler
        self._backend = backend
        self._clock = clock
        self._step_s = 0.0
        self._ended_at_s: float | None = None  # of the step before, if more work followed at once

    @property
    def name(self) -> str:
        """Kind of engine."""
        return self._name

    @property
    def limits(self) -> Limits:
        """Constant after loading."""
        return self._scheduler.limits

    @property
    def has_work(self) -> bool:
        """Whether `step()` would do or report anything."""
        return self._scheduler.has_work

    @property
    def scheduler(self) -> Scheduler:
        """For tests and tools: the pool and its counters."""
        return self._scheduler

    def add(self, request: SequenceRequest) -> None:
        """Take a sequence; RefusedError when it is not valid here."""
        self._scheduler.add(request)

    def cancel(self, key: int) -> None:
        """End a sequence at the next step."""
        self._scheduler.cancel(key)

    def step(self) -> StepEvents:
        """Compute one step; its duration counts from the end of the one before, while busy."""
        started_at_s = self._clock()
        plan = self._scheduler.plan(started_at_s)
        if plan:
            try:
                output = self._backend.run(plan)
            except StepFailedError as error:
                self._scheduler.fail(plan, str(error))
            else:
                now_s = self._clock()
                self._scheduler.commit(plan, output.tokens, now_s)
                self._step_s = now_s - (self._ended_at_s or started_at_s)
                self._ended_at_s = now_s if self._scheduler.has_work else None
        return self._scheduler.take_events()

    def load(self) -> EngineLoad:
        """Return the state after the last step."""
        return self._scheduler.load(self._step_s)

    def cached_blocks(self) -> list[bytes]:
        """Return the hashes of all cached blocks."""
        return self._scheduler.pool.cached()
