"""Dynamo's KV router at temperature 0, with and without its router queue."""

from collections import deque

from sim.engines import Job
from sim.policies.base import ArrivalPolicy
from sim.policies.hold import HoldQueue
from sim.pool import SimPool


class Dynamo(ArrivalPolicy):
    """Chooses the replica with the smallest `scale * prefill blocks + decode blocks`.

    Ties are drawn by lot. Prefill blocks are the uncached blocks of the new prompt, and of
    dispatched jobs without a first token. Decode blocks are the distinct blocks of jobs in flight,
    including the new job.

    Args:
        scale: Dynamo's option `prefill_load_scale`.
    """

    def __init__(self, name: str, *, scale: float = 1.0) -> None:
        self.name = name
        self._scale = scale

    def bind(self, pool: SimPool) -> None:
        """Begin a run without active blocks."""
        super().bind(pool)
        self.prefill_tokens = [0] * pool.replicas_max
        self._active: list[dict[int, int]] = [{} for _ in range(pool.replicas_max)]
        self._uncached: dict[int, int] = {}  # uncached tokens by number of the job

    def pick(self, job: Job) -> int:
        """Return the replica with the smallest cost, and add the job's blocks to its record."""
        pool = self.pool
        depths = pool.hits(job.blocks)
        costs = [0.0] * pool.replicas_max
        for replica in pool.alive:
            owed = (self.prefill_tokens[replica] + job.prompt_tokens) / pool.block_tokens
            prefill = max(0.0, owed - depths[replica])
            active = self._active[replica]
            known = 0  # active blocks are whole chains, so the first unknown block ends the match
            for block in job.blocks:
                if block not in active:
                    break
                known += 1
            costs[replica] = self._scale * prefill + len(active) + len(job.blocks) - known
        chosen = self.smallest(costs)
        uncached = max(0, job.prompt_tokens - depths[chosen] * pool.block_tokens)
        self.prefill_tokens[chosen] += uncached
        self._uncached[job.number] = uncached
        active = self._active[chosen]
        for block in job.blocks:
            active[block] = active.get(block, 0) + 1
        return chosen

    def first(self, job: Job) -> None:
        """Remove a job's uncached tokens from the outstanding prefill."""
        self.prefill_tokens[job.replica] -= self._uncached.pop(job.number)

    def done(self, job: Job) -> None:
        """Remove a job's blocks from the active blocks."""
        super().done(job)
        active = self._active[job.replica]
        for block in job.blocks:
            users = active[block] - 1
            if users:
                active[block] = users
            else:
                del active[block]


class DynamoQueue(Dynamo):
    """Queues requests while the outstanding prefill of every replica exceeds a threshold.

    Args:
        scale: Dynamo's option `prefill_load_scale`.
        threshold_steps: Dynamo's option `router_queue_threshold`, in steps full of prompt tokens.
        is_shortest_first: Whether the queue is WSPT (fewest uncached tokens at the best replica
            first) or FCFS.
    """

    def __init__(
        self, name: str, *, scale: float, threshold_steps: float, is_shortest_first: bool
    ) -> None:
        super().__init__(name, scale=scale)
        self._threshold_steps = threshold_steps
        self._is_shortest_first = is_shortest_first

    def bind(self, pool: SimPool) -> None:
        """Begin a run with empty queues."""
        super().bind(pool)
        self._tokens_max = self._threshold_steps * pool.cost.size.step_tokens_max
        self._fifo: deque[Job] = deque()
        self._shortest = HoldQueue(self._uncached_at_best)
        self._is_armed = False

    def _uncached_at_best(self, job: Job) -> float:
        cached = self.pool.hit_best(job.blocks) * self.pool.block_tokens
        return job.prompt_tokens - min(cached, job.prompt_tokens - 1)

    def arrive(self, job: Job) -> None:
        """Queue a job, and dispatch as many jobs as the threshold permits."""
        if self._is_shortest_first:
            self._shortest.push(job)
        else:
            self._fifo.append(job)
        self._pump()

    def first(self, job: Job) -> None:
        """Record a first token, after which a queued job may be dispatched."""
        super().first(job)
        self._arm()

    def added(self, replica: int) -> None:  # noqa: ARG002
        """Schedule dispatches to a new replica."""
        self._arm()

    def block_changed(self, replica: int, block: int, *, is_stored: bool) -> None:  # noqa: ARG002  # noqa: ARG002
        """Update the keys of queued jobs that contain the block."""
        self._shortest.changed(block)

    def _arm(self) -> None:
        """Schedule dispatches from the queue after the current step of the calling engine."""
        if not self._is_armed and (self._fifo or self._shortest):
            self._is_armed = True
            self.pool.timeline.at(self.pool.now, self._wake)

    def _wake(self) -> None:
        self._is_armed = False
        self._pump()

    def _pump(self) -> None:
        alive = self.pool.alive
        while self._fifo or self._shortest:
            if min(self.prefill_tokens[replica] for replica in alive) > self._tokens_max:
                return
            self.send(self._shortest.pop() if self._is_shortest_first else self._fifo.popleft())
