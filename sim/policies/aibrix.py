"""AIBrix' prefix-cache policy."""

import math

from sim.engines import Job
from sim.policies.base import ArrivalPolicy
from sim.pool import SimPool


class AibrixPrefixCache(ArrivalPolicy):
    """AIBrix' choice, by the number of requests if loads are uneven and by prefix match otherwise.

    If loads are uneven, the replica with the fewest requests is chosen. Otherwise the longest match
    is chosen among replicas with at most the mean load plus one standard deviation. Ties and
    requests without a match are placed on the replica with the fewest requests. Prompts are matched
    with the policy's own earlier decisions. AIBrix' limit of 200,000 blocks is omitted.

    Args:
        spread_max: Largest difference of requests in flight at which loads count as even.
    """

    name = "aibrix_prefix_cache"

    def __init__(self, name: str = name, *, spread_max: int = 8) -> None:
        self.name = name
        self._spread_max = spread_max

    def bind(self, pool: SimPool) -> None:
        """Begin a run, without any decision on record."""
        super().bind(pool)
        self._sent: dict[int, int] = {}  # bit mask of replicas by block that was sent to them

    def pick(self, job: Job) -> int:
        """Return the chosen replica, and record the job's blocks for it."""
        replica = self._pick(job)
        for block in job.blocks:
            self._sent[block] = self._sent.get(block, 0) | 1 << replica
        return replica

    def _pick(self, job: Job) -> int:
        loads = [self.in_flight[replica] for replica in self.pool.alive]
        if max(loads) - min(loads) > self._spread_max:
            return self.smallest(self.in_flight)
        depths = self.pool.hits(job.blocks, self._sent)
        mean = sum(loads) / len(loads)
        bound = mean + math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
        holders = sorted(
            (replica for replica in self.pool.alive if depths[replica]),
            key=lambda r: (-depths[r], self.in_flight[r], self.random.random()),
        )
        fitting = (replica for replica in holders if self.in_flight[replica] <= bound)
        chosen = next(fitting, None)
        return self.smallest(self.in_flight) if chosen is None else chosen

    def forget(self, replica: int) -> None:
        """Drop the decisions for a dead replica."""
        rest = ~(1 << replica)
        self._sent = {block: mask & rest for block, mask in self._sent.items()}
