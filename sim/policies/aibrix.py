"""AIBrix' prefix-cache policy."""

import math

from sim.engines import Job
from sim.policies.base import ArrivalPolicy
from sim.pool import SimPool


class AibrixPrefixCache(ArrivalPolicy):
    """If loads are uneven, chooses the replica with the fewest requests. Otherwise chooses the
    longest match among replicas with at most the mean load plus one standard deviation (ties go
    to fewer requests), and without a match the replica with the fewest requests.

    Matches are against the policy's own decisions; AIBrix' limit of 200,000 blocks is left out.

    Args:
        spread_max: Largest difference of requests in flight at which loads count as even.
    """  # noqa: D205

    name = "aibrix_prefix_cache"

    def __init__(self, name: str = name, *, spread_max: int = 8) -> None:
        self.name = name
        self._spread_max = spread_max

    def bind(self, pool: SimPool) -> None:
        """See `Policy`."""
        super().bind(pool)
        self._sent: dict[int, int] = {}  # block -> mask of replicas

    def pick(self, job: Job) -> int:
        """See `ArrivalPolicy`."""
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
        """See `ArrivalPolicy`."""
        rest = ~(1 << replica)
        self._sent = {block: mask & rest for block, mask in self._sent.items()}
