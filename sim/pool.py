"""A pool of simulated replicas for one policy, with arrivals, the KV index, loss and growth.

The index maps a block to a bit mask of the replicas that have the block cached, and is exact and
always current. A policy that must decide on old state has its own copy (`sim.policies.sluice`).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from replica.drivers.sim_costs import CostModel, StepWork
from sim.blocks import SharedPrefixes
from sim.engines import Engine, Job
from sim.timeline import Timeline
from sim.workload import Trace


class Policy(Protocol):
    """Decides when and on which replica each job is served.

    A policy may queue jobs and call `SimPool.dispatch` later, from any method of this protocol or
    from an action on `SimPool.timeline`.
    """

    name: str

    def bind(self, pool: "SimPool") -> None:
        """Prepare the policy for a run on a pool, before any arrival."""
        ...

    def arrive(self, job: Job) -> None:
        """Dispatch an arriving job now, or queue it."""
        ...

    def first(self, job: Job) -> None:
        """Record the first token of the job's attempt."""
        ...

    def done(self, job: Job) -> None:
        """Record the end of the job."""
        ...

    def lost(self, replica: int, jobs: Sequence[Job]) -> None:
        """Dispatch the jobs of a dead replica to other replicas, the oldest dispatch first."""
        ...

    def added(self, replica: int) -> None:
        """Use a new replica with an empty cache."""
        ...

    def block_changed(self, replica: int, block: int, *, is_stored: bool) -> None:
        """Record that a replica, or -1 for the shared cache, stored or evicted a block."""
        ...


@dataclass(frozen=True, slots=True)
class SimPoolPlan:
    """The replicas of a simulated pool, and its faults and growth.

    Attributes:
        replicas: Number of replicas at the start.
        speed_spread: Half-width of the uniform distribution of speeds around 1.
        seed: Seed of speeds and of the policy's draws.
        lose_at_s: Virtual seconds at which replica 0 dies, or None if it stays alive.
        add_at_s: Virtual seconds at which one more replica with an empty cache joins, or None if no
            replica joins.
        kv_tokens: KV memory of a replica in tokens, or None for the size of the cost model.
        is_shared: Whether all replicas share one infinite cache, the upper bound of any routing.
    """

    replicas: int
    speed_spread: float = 0.0
    seed: int = 0
    lose_at_s: float | None = None
    add_at_s: float | None = None
    kv_tokens: int | None = None
    is_shared: bool = False


class SimPool:
    """The replicas, index and jobs of one run.

    Attributes:
        timeline: Virtual time.
        engines: All replicas that exist at any time of this run, by number.
        alive: Numbers of the replicas that are alive now.
        replicas_max: Length of `engines`.
        index: Bit mask of replicas by block.
        jobs: All arrivals so far and to come, by number.
    """

    def __init__(
        self,
        policy: Policy,
        cost: CostModel,
        plan: SimPoolPlan,
        *,
        block_tokens: int,
    ) -> None:
        self.policy = policy
        self.cost = cost
        self.plan = plan
        self.seed = plan.seed
        self.block_tokens = block_tokens
        self.timeline = Timeline()
        self.index: dict[int, int] = {}
        self.jobs: list[Job] = []
        self.replicas_max = plan.replicas + (plan.add_at_s is not None)
        self._shared = SharedPrefixes(self._on_shared) if plan.is_shared else None
        draw = random.Random(f"speed {plan.seed}")  # noqa: S311 - repeatable on purpose
        self.engines = [
            Engine(
                number,
                cost,
                self.timeline,
                self,
                block_tokens=block_tokens,
                kv_tokens=plan.kv_tokens,
                speed=1.0 + plan.speed_spread * (2.0 * draw.random() - 1.0),
                shared=self._shared,
            )
            for number in range(self.replicas_max)
        ]
        self.alive = list(range(plan.replicas))
        policy.bind(self)
        if plan.lose_at_s is not None:
            self.timeline.at(plan.lose_at_s, self.lose, 0)
        if plan.add_at_s is not None:
            self.timeline.at(plan.add_at_s, self.add, plan.replicas)

    @property
    def now(self) -> float:
        """The time in virtual seconds."""
        return self.timeline.now

    @property
    def token_s(self) -> float:
        """Seconds per prompt token in a full mixed step with 16 decodes of 4,000 tokens each."""
        tokens = self.cost.size.step_tokens_max
        work = StepWork(tokens, tokens * (4096 + tokens / 2), 4096, 16, 16 * 4000)
        return self.cost.step_s(work) / tokens

    def run(self, trace: Trace, time_factor: float = 1.0) -> float:
        """Replay a trace with scaled arrival times, and return the time of the last end."""
        assert trace.block_tokens == self.block_tokens
        for number, request in enumerate(trace.requests):
            job = Job(request, number, request.arrived_s * time_factor)
            self.jobs.append(job)
            self.timeline.at(job.arrived_at, self.policy.arrive, job)
        self.timeline.run()
        return max((job.ended_at or 0.0) for job in self.jobs)

    # --- calls by policies ------------------------------------------------------------------

    def dispatch(self, job: Job, replica: int) -> None:
        """Submit a job to a replica that is alive, at the present time."""
        assert replica in self.alive
        self.engines[replica].submit(job)

    def hits(self, blocks: Sequence[int], index: Mapping[int, int] | None = None) -> list[int]:
        """Return how many leading blocks each replica has cached, by the exact or another index."""
        if self._shared is not None:
            return [self._shared.match(blocks)] * self.replicas_max
        get = (self.index if index is None else index).get
        depths = [0] * self.replicas_max
        left = (1 << self.replicas_max) - 1
        depth = 0
        for block in blocks:
            here = get(block, 0) & left
            if here != left:
                self._settle(depths, left & ~here, depth)
                if not here:
                    return depths
                left = here
            depth += 1
        self._settle(depths, left, depth)
        return depths

    def hit_best(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that the best replica has cached."""
        if self._shared is not None:
            return self._shared.match(blocks)
        left = -1
        for depth, block in enumerate(blocks):
            left &= self.index.get(block, 0)
            if not left:
                return depth
        return len(blocks)

    @staticmethod
    def _settle(depths: list[int], replicas: int, depth: int) -> None:
        while replicas:
            lowest = replicas & -replicas
            depths[lowest.bit_length() - 1] = depth
            replicas ^= lowest

    # --- faults -----------------------------------------------------------------------------

    def lose(self, replica: int) -> None:
        """Kill a replica. Its cache is lost, and the policy dispatches its jobs again."""
        self.alive.remove(replica)
        jobs = self.engines[replica].kill()
        self.policy.lost(replica, jobs)

    def add(self, replica: int) -> None:
        """Add a replica with an empty cache to the pool."""
        assert replica not in self.alive
        self.alive.append(replica)
        self.policy.added(replica)

    # --- events of engines ------------------------------------------------------------------

    def on_first(self, job: Job) -> None:
        """Pass a first token to the policy."""
        self.policy.first(job)

    def on_done(self, job: Job) -> None:
        """Pass the end of a job to the policy."""
        self.policy.done(job)

    def on_stored(self, replica: int, block: int) -> None:
        """Add a block to the index, and pass the change to the policy."""
        self.index[block] = self.index.get(block, 0) | 1 << replica
        self.policy.block_changed(replica, block, is_stored=True)

    def on_removed(self, replica: int, block: int) -> None:
        """Remove a block from the index, and pass the change to the policy."""
        left = self.index[block] & ~(1 << replica)
        if left:
            self.index[block] = left
        else:
            del self.index[block]
        self.policy.block_changed(replica, block, is_stored=False)

    def _on_shared(self, block: int) -> None:
        self.policy.block_changed(-1, block, is_stored=True)
