"""Holds the state that every peer's policy keeps: requests in flight per replica.

Peers are other platforms' decisions in our own code, written from what they document and publish.
Where they need state that they could not have at once, they get it exact and instant.
"""

import random
from abc import abstractmethod
from collections.abc import Sequence

from sim.engines import Job
from sim.pool import SimPool

_TIE = 1e-12


class ArrivalPolicy:
    """A policy that binds at arrival: `pick` decides. Lost jobs are picked for again at once.

    Attributes:
        in_flight: Jobs dispatched and not ended, by replica.
    """

    name = "peer"

    def bind(self, pool: SimPool) -> None:
        """Begin a run."""
        self.pool = pool
        self.in_flight = [0] * pool.replicas_max
        # Drawn once more, so that its numbers are not those of a trace with the same seed.
        seed = random.Random(pool.seed).random()  # noqa: S311 - repeatable on purpose
        self.random = random.Random(seed)  # noqa: S311

    @abstractmethod
    def pick(self, job: Job) -> int:
        """Return the replica for a job, one of `pool.alive`."""

    def arrive(self, job: Job) -> None:
        """Dispatch a job at once."""
        self.send(job)

    def send(self, job: Job) -> None:
        """Dispatch a job to the replica picked for it."""
        replica = self.pick(job)
        self.in_flight[replica] += 1
        self.pool.dispatch(job, replica)

    def first(self, job: Job) -> None:
        """See `Policy`."""

    def done(self, job: Job) -> None:
        """See `Policy`."""
        self.in_flight[job.replica] -= 1

    def lost(self, replica: int, jobs: Sequence[Job]) -> None:
        """See `Policy`."""
        for job in jobs:
            if job.first_step < 0:
                self.first(job)
            self.done(job)
            job.restart(self.pool.block_tokens)
        self.forget(replica)
        for job in jobs:
            self.arrive(job)

    def forget(self, replica: int) -> None:
        """Drop the known cache content of a dead replica."""

    def added(self, replica: int) -> None:
        """See `Policy`."""

    def block_changed(self, replica: int, block: int, *, is_stored: bool) -> None:
        """See `Policy`."""

    def smallest(self, costs: Sequence[float]) -> int:
        """Return the living replica with the smallest cost; ties are drawn.

        Args:
            costs: One per replica, dead ones included.
        """
        alive = self.pool.alive
        least = min(costs[replica] for replica in alive) + _TIE
        best = [replica for replica in alive if costs[replica] <= least]
        return best[0] if len(best) == 1 else self.random.choice(best)
