"""Background work of a gateway, which is bounded and ends when the gateway stops."""

import asyncio
from collections.abc import Coroutine

from gateway.dispatch.generation import GenerationSpec
from sluice.priority import CLASSES, queue_priority

_LAST_PRIORITY = queue_priority(0, CLASSES - 1)


class SpareTasks:
    """Bounded background tasks of one worker, which `run` owns. `run` has to run in a TaskGroup."""

    def __init__(self, tasks_max: int) -> None:
        """At most `tasks_max` tasks run at once."""
        self._tasks_max = tasks_max
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> int:
        """Number of running tasks."""
        return len(self._running)

    @property
    def is_stopped(self) -> bool:
        """Whether no task can begin, because the worker stops or has not started yet."""
        return self._tasks is None

    @property
    def is_full(self) -> bool:
        """Whether no further task can begin now."""
        return self._tasks is None or len(self._running) >= self._tasks_max

    async def run(self) -> None:
        """Start tasks until cancelled or stopped."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    def stop(self) -> None:
        """Cancel the running tasks, and begin no more."""
        self._tasks = None
        for task in self._running:
            task.cancel()

    def begin(self, work: Coroutine[None, None, None]) -> None:
        """Begin a task, which is allowed only while `is_full` is false."""
        assert self._tasks is not None, "it is stopped"
        running = self._tasks.create_task(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)


def as_last(spec: GenerationSpec) -> GenerationSpec:
    """Return a spec with the lowest priority, which other work may preempt."""
    return spec._replace(
        tier_priority=_LAST_PRIORITY,
        tier_reserved_permille=0,
        is_preemptible=True,
        is_begun=False,
        new_logprobs=None,
    )
