"""Preble's E2 scheduler, which follows a long prefix match, or else balances the recent load."""

from collections import deque

from sim.engines import Job
from sim.policies.base import ArrivalPolicy
from sim.pool import SimPool

_WINDOW_S = 180.0
_DECODE_TOKENS = 45  # expected decode tokens per request
_TPOT_PRIOR_S = 0.05
_TPOT_GAIN = 0.05


class PrebleE2(ArrivalPolicy):
    """Chooses the cheapest replica, among the longest matches if more than half is cached.

    The cost has two parts. They are the prefill seconds sent in the last 3 minutes, and 45 tokens
    at the replica's TPOT for each request in flight. Preble's rebalancing and eviction term are
    omitted.
    """

    name = "preble_e2"

    def bind(self, pool: SimPool) -> None:
        """Begin a run without decisions."""
        super().bind(pool)
        self._sent: dict[int, int] = {}  # bit mask of replicas by block that was sent to them
        self._recent: deque[tuple[float, int, float]] = deque()  # (time, replica, prefill seconds)
        self._prefill_s = [0.0] * pool.replicas_max
        self._tpot_s = [_TPOT_PRIOR_S] * pool.replicas_max

    def pick(self, job: Job) -> int:
        """Return the cheapest replica, and record the job's blocks for it."""
        pool = self.pool
        while self._recent and self._recent[0][0] < pool.now - _WINDOW_S:
            _, replica, spent_s = self._recent.popleft()
            self._prefill_s[replica] -= spent_s
        depths = pool.hits(job.blocks, self._sent)
        costs = [
            prefill_s + _DECODE_TOKENS * tpot_s * flying
            for prefill_s, tpot_s, flying in zip(
                self._prefill_s, self._tpot_s, self.in_flight, strict=True
            )
        ]
        longest = max(depths[replica] for replica in pool.alive)
        if min(longest * pool.block_tokens, job.prompt_tokens) > job.prompt_tokens / 2:
            holders = [replica for replica in pool.alive if depths[replica] == longest]
            chosen = min(holders, key=costs.__getitem__)
        else:
            chosen = self.smallest(costs)
        uncached = max(0, job.prompt_tokens - depths[chosen] * pool.block_tokens)
        self._prefill_s[chosen] += uncached * pool.token_s
        self._recent.append((pool.now, chosen, uncached * pool.token_s))
        for block in job.blocks:
            self._sent[block] = self._sent.get(block, 0) | 1 << chosen
        return chosen

    def done(self, job: Job) -> None:
        """Update the replica's TPOT with an ended job."""
        super().done(job)
        if job.ended_at is not None and job.first_at is not None and job.output_tokens > 1:
            tpot_s = (job.ended_at - job.first_at) / (job.output_tokens - 1)
            known_s = self._tpot_s[job.replica]
            self._tpot_s[job.replica] = known_s + _TPOT_GAIN * (tpot_s - known_s)

    def forget(self, replica: int) -> None:
        """Drop the decisions for a dead replica."""
        rest = ~(1 << replica)
        self._sent = {block: mask & rest for block, mask in self._sent.items()}
