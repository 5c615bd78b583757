"""Runs slow work, such as reading adapters, in threads beside the step loop."""

import logging
import threading
from collections.abc import Callable
from queue import Empty, Full, Queue
from typing import Any

log = logging.getLogger(__name__)

Job = tuple[Callable[[], Any], Callable[[Any], None]]


class HostWorkers:
    """Runs jobs outside the step loop, and delivers their results in the step loop."""

    def __init__(
        self, deliver: Callable[[Callable[[], None]], None], *, threads: int, jobs_max: int
    ) -> None:
        """Create idle workers.

        Args:
            deliver: Function that runs another function in the step loop.
            threads: Number of concurrent jobs.
            jobs_max: Largest number of waiting jobs.
        """
        self._deliver = deliver
        self._jobs: Queue[Job | None] = Queue(jobs_max)
        # The threads are daemon threads, because a read that hangs in a broken file system must not
        # prevent the end of the process.
        self._threads = [
            threading.Thread(target=self._work, name=f"worker-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> bool:
        """Call `work` in a worker, then `done` in the step loop.

        `done` receives the result of `work`, or the exception that `work` raised. Returns False
        without a call if too many jobs wait.
        """
        try:
            self._jobs.put_nowait((work, done))
        except Full:
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """Drop waiting jobs and stop. Running jobs are awaited for at most `timeout_s`."""
        try:
            while True:
                self._jobs.get_nowait()
        except Empty:
            pass
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            outcome: Any
            try:
                outcome = work()
            except Exception as error:  # noqa: BLE001 - the caller of `run` handles it
                outcome = error
            except BaseException as error:  # noqa: BLE001 - the exception of a panic in Rust code
                # Without an outcome the caller would wait forever. Without this clause the worker
                # would die, and without workers all jobs would stop.
                outcome = RuntimeError(f"{type(error).__name__}: {error}")
            self._deliver(lambda done=done, outcome=outcome: done(outcome))
