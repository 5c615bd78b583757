"""A pool of simulated replicas behind one policy: arrivals, the KV index, loss and growth.

The index maps a block to a bit mask of the replicas that hold it; it is exact and instant. A policy
that may only know old state keeps its own view (see `sim.policies.sluice`).
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
    """Decides which replica serves which job, and when.

    A policy may hold jobs and call `Pool.dispatch` later, from any of these methods or from an
    action on `Pool.timeline`.
    """

    name: str

    def bind(self, pool: "SimPool") -> None:
        """Begin a run, before any arrival."""
        ...

    def arrive(self, job: Job) -> None:
        """Take a job: dispatch it now or hold it."""
        ...

    def first(self, job: Job) -> None:
        """Note the first token of the job's attempt."""
        ...

    def done(self, job: Job) -> None:
        """Note the end of the job."""
        ...

    def lost(self, replica: int, jobs: Sequence[Job]) -> None:
        """Serve the jobs of a dead replica elsewhere; the longest there come first."""
        ...

    def added(self, replica: int) -> None:
        """Use a new replica with an empty cache."""
        ...

    def block_changed(self, replica: int, block: int, *, is_stored: bool) -> None:
        """Note that a replica stored or removed a block; -1 is the cache that all share."""
        ...


@dataclass(frozen=True, slots=True)
class SimPoolPlan:
    """The make-up of a simulated pool, and its faults and growth.

    Attributes:
        replicas: Number of replicas at the start.
        speed_spread: Speeds are drawn uniformly from 1 - spread to 1 + spread.
        seed: Seed of speeds and of the policy's draws.
        lose_at_s: Virtual seconds at which replica 0 dies; None: it does not.
        add_at_s: Virtual seconds at which one more replica with an empty cache joins.
        kv_tokens: KV memory of a replica in tokens; None: by the cost model.
        is_shared: Whether all replicas share one infinite cache: the upper bound.
    """

    replicas: int
    speed_spread: float = 0.0
    seed: int = 0
    lose_at_s: float | None = None
    add_at_s: float | None = None
    kv_tokens: int | None = None
    is_shared: bool = False


class SimPool:
    """Replicas, index and jobs of one run.

    Attributes:
        timeline: Virtual time.
        engines: All replicas that ever live in this run, by number.
        alive: Numbers of those that live now.
        replicas_max: Length of `engines`.
        index: Block -> bit mask of replicas.
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
        """Seconds per prompt token in a full mixed step: 16 decodes of 4,000 tokens each."""
        tokens = self.cost.size.step_tokens_max
        work = StepWork(tokens, tokens * (4096 + tokens / 2), 4096, 16, 16 * 4000)
        return self.cost.step_s(work) / tokens

    def run(self, trace: Trace, time_factor: float = 1.0) -> float:
        """Replay a trace with arrival times multiplied; return when everything has ended."""
        assert trace.block_tokens == self.block_tokens
        for number, request in enumerate(trace.requests):
            job = Job(request, number, request.arrived_s * time_factor)
            self.jobs.append(job)
            self.timeline.at(job.arrived_at, self.policy.arrive, job)
        self.timeline.run()
        return max((job.ended_at or 0.0) for job in self.jobs)

    # --- for policies -----------------------------------------------------------------------

    def dispatch(self, job: Job, replica: int) -> None:
        """Give a job to a living replica, now."""
        assert replica in self.alive
        self.engines[replica].submit(job)

    def hits(self, blocks: Sequence[int], index: Mapping[int, int] | None = None) -> list[int]:
        """Return how many leading blocks each replica holds, by the exact index or another one."""
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
        """Return how many leading blocks the replica with the longest match holds."""
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
        """Kill a replica: its cache is gone, and the policy serves its jobs elsewhere."""
        self.alive.remove(replica)
        jobs = self.engines[replica].kill()
        self.policy.lost(replica, jobs)

    def add(self, replica: int) -> None:
        """Let a replica join."""
        assert replica not in self.alive
        self.alive.append(replica)
        self.policy.added(replica)

    # --- what engines tell ------------------------------------------------------------------

    def on_first(self, job: Job) -> None:
        """See `Listener`."""
        self.policy.first(job)

    def on_done(self, job: Job) -> None:
        """See `Listener`."""
        self.policy.done(job)

    def on_stored(self, replica: int, block: int) -> None:
        """See `Listener`."""
        self.index[block] = self.index.get(block, 0) | 1 << replica
        self.policy.block_changed(replica, block, is_stored=True)

    def on_removed(self, replica: int, block: int) -> None:
        """See `Listener`."""
        left = self.index[block] & ~(1 << replica)
        if left:
            self.index[block] = left
        else:
            del self.index[block]
        self.policy.block_changed(replica, block, is_stored=False)

    def _on_shared(self, block: int) -> None:
        self.policy.block_changed(-1, block, is_stored=True)
