"""The endpoint picker of llm-d in three profiles.

The profiles are the default, precise prefixes, and predicted latency.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from replica.drivers.sim_costs import StepWork
from sim.engines import Job
from sim.policies.base import ArrivalPolicy
from sim.pool import SimPool

_METRICS_AGE_S = 0.05
_MATCH_TOKENS_MAX = 256 * 16
_INDEX_TOKENS_MAX = 31_250 * 16
_EXPLORE = 0.01
_TTFT_GATE_S = 5.0


class LlmdScores(ArrivalPolicy):
    """Chooses the replica with the largest weighted sum of grades for queue, free KV and prefix.

    Args:
        weights: Weights of queue, KV use and prefix.
        is_exact: Whether the prefix grade is computed from the exact index. Otherwise it is
            computed from the policy's decisions, with the first 4,096 tokens per prompt and the
            latest 500,000 tokens per replica.
    """

    def __init__(self, name: str, weights: tuple[float, float, float], *, is_exact: bool) -> None:
        self.name = name
        self._weights = weights
        self._is_exact = is_exact

    def bind(self, pool: SimPool) -> None:
        """Begin a run without decisions or metrics."""
        super().bind(pool)
        self._read_at = float("-inf")
        self._queues: list[int] = []
        self._kv_used: list[float] = []
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(pool.replicas_max)]

    def pick(self, job: Job) -> int:
        """Return the replica with the largest sum, and record the job's blocks for it."""
        self._read_metrics()
        blocks = job.blocks
        if self._is_exact:
            depths = self.pool.hits(blocks)
        else:
            blocks = blocks[: max(1, _MATCH_TOKENS_MAX // self.pool.block_tokens)]
            depths = [self._depth(sent, blocks) for sent in self._sent]
        replica = self.smallest(self._costs(depths, len(blocks)))
        if not self._is_exact:
            self._remember(replica, blocks)
        return replica

    def _read_metrics(self) -> None:
        if self.pool.now - self._read_at < _METRICS_AGE_S:
            return
        self._read_at = self.pool.now
        engines = self.pool.engines
        self._queues = [len(engine.waiting) for engine in engines]
        self._kv_used = [engine.cache.used / engine.cache.capacity for engine in engines]

    def _costs(self, depths: Sequence[int], blocks: int) -> list[float]:
        by_queue, by_kv, by_prefix = self._weights
        queues = [self._queues[replica] for replica in self.pool.alive]
        longest, spread = max(queues), max(queues) - min(queues)
        return [
            -by_queue * ((longest - queue) / spread if spread else 1.0)
            - by_kv * (1.0 - used)
            - by_prefix * depth / blocks
            for queue, used, depth in zip(self._queues, self._kv_used, depths, strict=True)
        ]

    @staticmethod
    def _depth(sent: Mapping[int, None], blocks: Sequence[int]) -> int:
        for depth, block in enumerate(blocks):
            if block not in sent:
                return depth
        return len(blocks)

    def _remember(self, replica: int, blocks: Sequence[int]) -> None:
        sent = self._sent[replica]
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) * self.pool.block_tokens > _INDEX_TOKENS_MAX:
            sent.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Drop the decisions for a dead replica, and read the metrics again."""
        self._sent[replica].clear()
        self._read_at = float("-inf")


class LlmdPredictedLatency(ArrivalPolicy):
    """Draws a replica with the weight of its predicted headroom, after two affinity filters.

    Two filters select the replicas that have cached 99 %, and then 80 %, of the prompt. 1 % of the
    requests skip a filter. So do requests for which the filter would add more than 5 s to the TTFT.
    Idle replicas are preferred. The predictor is written here and perfect. The grades are 0.8 TTFT
    and 0.2 TPOT, range-normalised. No objective is set.
    """

    name = "llmd_predlat"

    def pick(self, job: Job) -> int:
        """Return a replica, drawn with the weights of the grades."""
        pool = self.pool
        token_s = pool.token_s
        depths = pool.hits(job.blocks)
        ttft_s: dict[int, float] = {}
        tpot_s: dict[int, float] = {}
        for replica in pool.alive:
            engine = pool.engines[replica]
            uncached = max(1, job.prompt_tokens - depths[replica] * pool.block_tokens)
            ttft_s[replica] = (engine.owed_tokens + uncached) * token_s
            context = engine.context_tokens + job.prompt_tokens
            work = StepWork(decode_tokens=len(engine.decoding) + 1, decode_context=context)
            tpot_s[replica] = pool.cost.step_s(work)
        chosen = list(pool.alive)
        for share in (0.99, 0.80):
            chosen = self._near(chosen, depths, len(job.blocks) * share, ttft_s)
        chosen = [replica for replica in chosen if not self.in_flight[replica]] or chosen
        ttft, tpot = _grades(ttft_s, chosen), _grades(tpot_s, chosen)
        weights = [0.8 * ttft[replica] + 0.2 * tpot[replica] + 1e-6 for replica in chosen]
        return self.random.choices(chosen, weights)[0]

    def _near(
        self, replicas: list[int], depths: Sequence[int], least: float, ttft_s: Mapping[int, float]
    ) -> list[int]:
        if self.random.random() < _EXPLORE:
            return replicas
        near = [replica for replica in replicas if depths[replica] >= least]
        rest = [replica for replica in replicas if depths[replica] < least]
        if not near:
            return replicas
        if rest and min(ttft_s[r] for r in near) - min(ttft_s[r] for r in rest) > _TTFT_GATE_S:
            return replicas
        return near


def _grades(values: Mapping[int, float], chosen: Sequence[int]) -> dict[int, float]:
    """Return grades from 1 for the smallest of the chosen values to 0 for the largest."""
    low = min(values[replica] for replica in chosen)
    high = max(values[replica] for replica in chosen)
    if high == low:
        return dict.fromkeys(chosen, 1.0)
    return {replica: (high - values[replica]) / (high - low) for replica in chosen}
