"""The base class of peers' policies, which counts the requests in flight per replica.

Peers are other platforms, whose decisions are written here from their documentation and published
sources. State that a real peer would receive late is exact and current here.
"""

import random
from abc import abstractmethod
from collections.abc import Sequence

from sim.engines import Job
from sim.pool import SimPool

_TIE = 1e-12


class ArrivalPolicy:
    """A policy that dispatches jobs at arrival to the replica that `pick` returns.

    Attributes:
        in_flight: Number of dispatched jobs that have not ended, by replica.
    """

    name = "peer"

    def bind(self, pool: SimPool) -> None:
        """Begin a run on a pool, without jobs in flight."""
        self.pool = pool
        self.in_flight = [0] * pool.replicas_max
        # The seed is drawn from the pool's seed. So the numbers differ from those in a trace that
        # was generated with the pool's seed.
        seed = random.Random(pool.seed).random()  # noqa: S311 - repeatable on purpose
        self.random = random.Random(seed)  # noqa: S311

    @abstractmethod
    def pick(self, job: Job) -> int:
        """Return the replica for a job, one of `pool.alive`."""

    def arrive(self, job: Job) -> None:
        """Dispatch a job at once."""
        self.send(job)

    def send(self, job: Job) -> None:
        """Dispatch a job to the replica that `pick` returns."""
        replica = self.pick(job)
        self.in_flight[replica] += 1
        self.pool.dispatch(job, replica)

    def first(self, job: Job) -> None:
        """Ignore the first token."""

    def done(self, job: Job) -> None:
        """Subtract an ended job from the jobs in flight."""
        self.in_flight[job.replica] -= 1

    def lost(self, replica: int, jobs: Sequence[Job]) -> None:
        """Dispatch the jobs of a dead replica again."""
        for job in jobs:
            if job.first_step < 0:
                self.first(job)
            self.done(job)
            job.restart(self.pool.block_tokens)
        self.forget(replica)
        for job in jobs:
            self.arrive(job)

    def forget(self, replica: int) -> None:
        """Drop the policy's record of a dead replica's cache."""

    def added(self, replica: int) -> None:
        """Ignore a new replica, because `pick` reads `pool.alive`."""

    def block_changed(self, replica: int, block: int, *, is_stored: bool) -> None:
        """Ignore a change of a cache."""

    def smallest(self, costs: Sequence[float]) -> int:
        """Return the live replica with the smallest cost. Ties are drawn by lot.

        Args:
            costs: One cost per replica, dead replicas included.
        """
        alive = self.pool.alive
        least = min(costs[replica] for replica in alive) + _TIE
        best = [replica for replica in alive if costs[replica] <= least]
        return best[0] if len(best) == 1 else self.random.choice(best)
