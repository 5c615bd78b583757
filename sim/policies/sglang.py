"""SGLang's cache-aware router, which chooses the longest match in a tree of its decisions."""

from sim.engines import Job
from sim.policies.base import ArrivalPolicy
from sim.pool import SimPool


class SglangCacheAware(ArrivalPolicy):
    """Chooses the replica with the longest prefix match, or the smallest tree without a match.

    If replicas are imbalanced, the replica with the fewest requests in flight is chosen. The
    eviction of the original (after 120 s, or 2^26 characters) is omitted.

    Args:
        match_ratio: Share of the prompt that must match.
        imbalance: Difference of requests in flight above which replicas are imbalanced.
        imbalance_ratio: Ratio of requests in flight above which replicas are imbalanced. Both
            limits must be exceeded.
    """

    def __init__(
        self, name: str, *, match_ratio: float, imbalance: int, imbalance_ratio: float
    ) -> None:
        self.name = name
        self._match_ratio = match_ratio
        self._imbalance = imbalance
        self._imbalance_ratio = imbalance_ratio

    def bind(self, pool: SimPool) -> None:
        """Begin a run with empty trees."""
        super().bind(pool)
        self._holders: dict[int, int] = {}  # block -> mask of the replicas that were sent the block
        self._latest: dict[int, int] = {}
        self._sizes = [0] * pool.replicas_max

    def pick(self, job: Job) -> int:
        """Return the chosen replica, and add the job's blocks to its tree."""
        loads = [self.in_flight[replica] for replica in self.pool.alive]
        most, least = max(loads), min(loads)
        if most - least > self._imbalance and most > least * self._imbalance_ratio:
            replica = self.smallest(self.in_flight)
        else:
            replica = self._by_prefix(job)
        for block in job.blocks:
            mask = self._holders.get(block, 0)
            if not mask >> replica & 1:
                self._holders[block] = mask | 1 << replica
                self._sizes[replica] += 1
            self._latest[block] = replica
        return replica

    def _by_prefix(self, job: Job) -> int:
        depth = 0
        for block in job.blocks:
            if block not in self._holders:
                break
            depth += 1
        matched = min(depth * self.pool.block_tokens, job.prompt_tokens)
        if matched / job.prompt_tokens > self._match_ratio:
            return self._latest[job.blocks[depth - 1]]
        return self.smallest(self._sizes)

    def forget(self, replica: int) -> None:
        """Drop the tree of a dead replica."""
        rest = ~(1 << replica)
        self._holders = {block: mask & rest for block, mask in self._holders.items() if mask & rest}
        self._latest = {
            block: holder if holder != replica else mask.bit_length() - 1
            for block, mask in self._holders.items()
            for holder in (self._latest[block],)
        }
        self._sizes[replica] = 0
