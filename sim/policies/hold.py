"""A queue of jobs ordered by keys that depend on cached blocks, without full scans."""

from collections.abc import Callable
from heapq import heappop, heappush

from sim.engines import Job


class HoldQueue:
    """Jobs by key, smallest first, and with equal keys in order of `push`.

    A key is computed again only when a replica stored or removed a block of the job.

    Args:
        key: Returns the key of a job, from the job and the replicas that cache its blocks.
    """

    def __init__(self, key: Callable[[Job], float]) -> None:
        self._key = key
        self._jobs: dict[int, tuple[int, Job]] = {}  # number -> (order of push, job)
        self._keys: dict[int, float] = {}
        self._heap: list[tuple[float, int, int]] = []  # (key, order, number), with outdated entries
        self._watchers: dict[int, dict[int, None]] = {}  # block -> numbers of jobs with the block
        self._dirty: dict[int, None] = {}
        self._pushed = 0

    def __len__(self) -> int:
        """Return the number of jobs."""
        return len(self._jobs)

    def push(self, job: Job) -> None:
        """Add a job."""
        self._pushed += 1
        self._jobs[job.number] = (self._pushed, job)
        for block in job.blocks:
            self._watchers.setdefault(block, {})[job.number] = None
        self._dirty[job.number] = None

    def changed(self, block: int) -> None:
        """Record that a replica stored or removed a block."""
        watchers = self._watchers.get(block)
        if watchers:
            self._dirty.update(watchers)

    def pop(self) -> Job:
        """Remove and return the job with the smallest key."""
        self._refresh()
        while True:
            key, order, number = heappop(self._heap)
            known = self._jobs.get(number)
            if known is not None and known[0] == order and self._keys[number] == key:
                break
        job = self._jobs.pop(number)[1]
        del self._keys[number]
        for block in job.blocks:
            watchers = self._watchers[block]
            del watchers[number]
            if not watchers:
                del self._watchers[block]
        return job

    def _refresh(self) -> None:
        for number in self._dirty:
            if number not in self._jobs:
                continue
            order, job = self._jobs[number]
            key = self._key(job)
            if self._keys.get(number) != key:
                self._keys[number] = key
                heappush(self._heap, (key, order, number))
        self._dirty.clear()
