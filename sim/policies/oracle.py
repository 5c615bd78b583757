"""The reference policy, with exact reports and one infinite cache that all replicas share."""

from sim.engines import Job
from sim.policies.base import ArrivalPolicy
from sim.policies.hold import HoldQueue
from sim.pool import SimPool

_WINDOW_S = 0.1
_POLL_S = 0.02
_CONTEXT_TOKENS = 4e5  # (cached + prompt tokens) at which the prefill time per token is doubled
_INTERFERENCE = 0.002  # share by which each job in flight slows a prefill


class Oracle(ArrivalPolicy):
    """Serves the job with the least `prefill - ageing * wait` first.

    A job is dispatched while some replica has less than 100 ms of outstanding prefill, to the
    replica with the smallest predicted end of prefill. On traces without shared prefixes the oracle
    is a strong reference, but no proven bound.
    """

    def __init__(self, name: str, *, ageing: float) -> None:
        self.name = name
        self._ageing = ageing

    def bind(self, pool: SimPool) -> None:
        """Begin a run on a pool with a shared cache."""
        assert pool.plan.is_shared
        super().bind(pool)
        self._token_s = pool.token_s
        # All replicas share one cache, so a key depends on the job alone. All waits grow equally,
        # so `prefill - ageing * wait` and `prefill + ageing * arrival` result in the same order.
        self._queue = HoldQueue(lambda job: self._prefill_s(job) + self._ageing * job.arrived_at)
        self._wakes = 0

    def _prefill_s(self, job: Job) -> float:
        hit = self.pool.hit_best(job.blocks) * self.pool.block_tokens
        hit = min(hit, job.prompt_tokens - 1)
        slower = 1.0 + (hit + job.prompt_tokens) / _CONTEXT_TOKENS
        return (job.prompt_tokens - hit) * self._token_s * slower

    def arrive(self, job: Job) -> None:
        """Queue a job, and dispatch as many jobs as the bound on prefill permits."""
        self._queue.push(job)
        self._pump()

    def first(self, job: Job) -> None:  # noqa: ARG002
        """Schedule dispatches after a first token."""
        self._arm(self.pool.now)

    def done(self, job: Job) -> None:
        """Schedule dispatches after the end of a job."""
        super().done(job)
        self._arm(self.pool.now)

    def added(self, replica: int) -> None:  # noqa: ARG002
        """Schedule dispatches to a new replica."""
        self._arm(self.pool.now)

    def block_changed(self, replica: int, block: int, *, is_stored: bool) -> None:  # noqa: ARG002  # noqa: ARG002
        """Update the keys of queued jobs that contain the block."""
        self._queue.changed(block)

    def _arm(self, time_s: float) -> None:
        if self._queue:
            self._wakes += 1
            self.pool.timeline.at(time_s, self._wake, self._wakes)

    def _wake(self, wake: int) -> None:
        if wake == self._wakes:
            self._pump()
            self._arm(self.pool.now + _POLL_S)

    def _pump(self) -> None:
        engines, alive = self.pool.engines, self.pool.alive
        while self._queue:
            if min(engines[r].owed_tokens for r in alive) * self._token_s >= _WINDOW_S:
                return
            self.send(self._queue.pop())

    def pick(self, job: Job) -> int:
        """Return the replica with the smallest predicted end of prefill."""
        own_s = self._prefill_s(job)
        return self.smallest(
            [
                (engine.owed_tokens * self._token_s + own_s) * (1.0 + _INTERFERENCE * flying)
                for engine, flying in zip(self.pool.engines, self.in_flight, strict=True)
            ]
        )
