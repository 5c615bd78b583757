"""Simulates one pool under a curve of demand, second by second.

Work is a divisible quantity (a fluid model), without single requests.

One ready replica does one work-second per second. A booting replica costs as much as a ready one.
The TTFT is 0.15 s, plus the backlog per ready replica, plus up to 0.3 s when utilisation is above
90 %.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import Protocol, runtime_checkable

TTFT_OBJECTIVE_S = 1.5
TTFT_IDLE_S = 0.15
# utilisation above which TTFT rises, and the seconds of TTFT per unit of utilisation above it
_BUSY, _BUSY_S = 0.9, 3.0
_MINUTE_S = 60
_VIOLATED_SHARE = 0.01  # a minute is violated if its 99th percentile of TTFT misses the objective
# utilisation under the first demand, which gives the initial number of replicas
FIRST_UTILISATION = 0.7
_FIRST_S = 300


@dataclass(frozen=True, slots=True)
class Terms:
    """Parameters of a simulation run.

    Attributes:
        boot_s: Least and greatest boot time of a replica in seconds. Times between are equally
            likely.
        replicas_min: Least number of replicas that a policy may choose.
        replicas_max: Greatest number of replicas that a policy may choose.
        objective_s: TTFT objective in seconds.
        sleepers_share: Sleeping replicas per replica that served in the busiest minute so far.
        sleepers_min: Least number of sleeping replicas. A run begins with this number.
        wake_s: Least and greatest wake time of a sleeping replica in seconds.
        tiers: Shares of the demand by tier, the highest tier first. The sum is 1.
        batch_deadline_s: Seconds that work of the lowest tier may wait, if there are several tiers.
    """

    boot_s: tuple[float, float] = (180.0, 300.0)
    replicas_min: int = 1
    replicas_max: int = 400
    objective_s: float = TTFT_OBJECTIVE_S
    sleepers_share: float = 0.0
    sleepers_min: int = 0
    wake_s: tuple[float, float] = (1.0, 6.0)
    tiers: tuple[float, ...] = (1.0,)
    batch_deadline_s: float = 900.0


@dataclass(slots=True)
class Sight:
    """The observations of a pool that a scaling policy may use.

    Attributes:
        demand: Work-seconds that arrived in each second so far.
        ttft_s: TTFT in each second, in seconds.
        utilisation: Share of the ready replicas' time that was used in each second.
        backlog_s: Work-seconds waiting per ready replica at the end of each second.
        ready: Replicas that serve.
        booting: Replicas that are booting or waking up.
        asleep: Replicas that are sleeping.
        backlog_work_s: Work-seconds that wait now, without those of the batch tier.
        deferred_work_s: Work-seconds of the batch tier that wait now.
        future: The whole curve of demand, for the oracle policy only.
    """

    future: Sequence[float]
    demand: list[float] = field(default_factory=list[float])
    ttft_s: list[float] = field(default_factory=list[float])
    utilisation: list[float] = field(default_factory=list[float])
    backlog_s: list[float] = field(default_factory=list[float])
    ready: int = 0
    booting: int = 0
    asleep: int = 0
    backlog_work_s: float = 0.0
    deferred_work_s: float = 0.0

    @property
    def provisioned(self) -> int:
        """Number of replicas that serve, boot or wake up."""
        return self.ready + self.booting


class ScalingRule(Protocol):
    """A scaling policy, which is called every `every_s` seconds."""

    every_s: int

    def target(self, t: int, sight: Sight) -> float:
        """Return the number of replicas that the pool should have at second `t`."""
        ...


@runtime_checkable
class SleepingRule(ScalingRule, Protocol):
    """A policy that also decides the number of sleeping replicas.

    For other policies `Terms` decides this number.

    Attributes:
        sleepers: Number of replicas that should sleep.
    """

    sleepers: int

    def woken(self, t: int, sight: Sight) -> int:
        """Return the number of sleeping replicas to wake at second `t`."""
        ...


@dataclass(frozen=True, slots=True)
class ScalingOutcome:
    """The result of one policy on one curve of demand.

    Attributes:
        violation_minutes: Minutes whose 99th percentile of TTFT misses the objective.
        violated_work_share: Share of the work that arrived while TTFT missed the objective.
        gpu_hours: Hours of all replicas, including booting and sleeping replicas.
        changes: Number of times that the policy changed the number of replicas.
        ttft_max_s: Longest TTFT in seconds.
        batch_late_share: Share of the batch tier's work that waited beyond its deadline.
        provisioned: Number of serving, booting and sleeping replicas, one value per minute.
        ready: Number of replicas that served, one value per minute.
        ttft_s: Greatest TTFT in seconds, one value per minute.
        tier_minutes: Violation minutes of each tier except batch, the highest tier first.
        violated: Whether each minute is a violation minute.
    """

    violation_minutes: int
    violated_work_share: float
    gpu_hours: float
    changes: int
    ttft_max_s: float
    batch_late_share: float
    provisioned: tuple[int, ...]
    ready: tuple[int, ...]
    ttft_s: tuple[float, ...]
    tier_minutes: tuple[int, ...]
    violated: tuple[bool, ...]


class Queues:
    """Waiting work by tier.

    The highest tier is served first. The lowest of several tiers is batch.
    """

    def __init__(self, terms: Terms) -> None:
        self._shares = terms.tiers
        self._deadline_s = terms.batch_deadline_s
        self.waiting = [0.0] * len(terms.tiers)
        self._batch: list[tuple[int, float]] = []  # (second of arrival, work-seconds)
        self.batch_late = self.batch_work = 0.0

    def add(self, t: int, work: float) -> None:
        """Add the work that arrives in one second."""
        for tier, share in enumerate(self._shares):
            self.waiting[tier] += share * work
        if len(self._shares) > 1:
            self.batch_work += self._shares[-1] * work
            self._batch.append((t, self._shares[-1] * work))

    def serve(self, t: int, capacity: float) -> float:
        """Serve at most the given work of one second, and return the served work."""
        left = capacity
        for tier, waiting in enumerate(self.waiting):
            done = min(waiting, left)
            self.waiting[tier] -= done
            left -= done
            if len(self.waiting) > 1 and tier == len(self.waiting) - 1:
                self._serve_batch(t, done)
        return capacity - left

    def _serve_batch(self, t: int, done: float) -> None:
        while self._batch and done > 0:
            came, work = self._batch[0]
            part = min(work, done)
            done -= part
            if t - came > self._deadline_s:
                self.batch_late += part
            if part < work - 1e-12:
                self._batch[0] = (came, work - part)
            else:
                del self._batch[0]

    def interactive(self) -> float:
        """Return the work that waits in every tier except batch."""
        return self.waiting[0] if len(self.waiting) == 1 else sum(self.waiting[:-1])

    def ahead(self) -> list[float]:
        """Return for each tier except batch the work that waits in it and in all higher tiers."""
        upper = self.waiting[:-1] or self.waiting
        return list(accumulate(upper))


class PaidPool(Protocol):
    """The numbers of replicas of a simulated pool."""

    @property
    def ready(self) -> int:
        """Number of replicas that serve."""
        ...

    @property
    def paid(self) -> int:
        """Number of serving, booting and sleeping replicas."""
        ...


class _Pool:
    """The replicas of the simulated pool that serve, boot, sleep or wake up."""

    def __init__(self, first: int, terms: Terms, seed: int) -> None:
        self.terms = terms
        self._random = random.Random(seed)  # noqa: S311 -- boot times, no secrets
        self.ready, self.sleeping = first, terms.sleepers_min
        self._boots: list[float] = []
        self._wakes: list[float] = []

    @property
    def booting(self) -> int:
        return len(self._boots) + len(self._wakes)

    @property
    def paid(self) -> int:
        return self.ready + self.booting + self.sleeping

    def tick(self, t: int) -> None:
        for waiting in (self._boots, self._wakes):
            come = [at for at in waiting if at <= t]
            self.ready += len(come)
            waiting[:] = [at for at in waiting if at > t]

    def wake(self, t: int, count: int) -> int:
        woken = min(count, self.sleeping)
        self.sleeping -= woken
        self._wakes += [t + self._random.uniform(*self.terms.wake_s) for _ in range(woken)]
        return woken

    def scale(self, t: int, want: int, sleepers: int) -> None:
        have = self.ready + self.booting
        missing = want - have
        if missing > 0:
            missing -= self.wake(t, missing)
            boots = (self._random.uniform(*self.terms.boot_s) for _ in range(missing))
            self._boots += [t + boot_s for boot_s in boots]
        elif missing < 0:
            self._boots.sort()
            cancelled = min(-missing, len(self._boots))
            del self._boots[len(self._boots) - cancelled :]
            stopped = min(-missing - cancelled, self.ready - 1)
            self.ready -= stopped
            self.sleeping += min(stopped, max(0, sleepers - self.sleeping))
        self.sleeping = min(self.sleeping, sleepers)


def play(demand: Sequence[float], rule: ScalingRule, terms: Terms, seed: int = 0) -> ScalingOutcome:
    """Simulate one policy on one curve of demand.

    Args:
        demand: Work-seconds per second, one value per second.
        rule: The scaling policy.
        terms: Parameters of the run.
        seed: Seed of the random boot times.
    """
    early = demand[:_FIRST_S]
    first = max(terms.replicas_min, 1, ceil(sum(early) / len(early) / FIRST_UTILISATION))
    if (own := getattr(rule, "replicas", None)) is not None:
        first = own
    pool = _Pool(min(first, terms.replicas_max), terms, seed)
    queues, sight, totals = Queues(terms), Sight(demand), Totals(terms)
    sleeping = rule if isinstance(rule, SleepingRule) else None
    for t, work in enumerate(demand):
        pool.tick(t)
        queues.add(t, work)
        used = queues.serve(t, pool.ready) / max(pool.ready, 1)
        backlog_s = queues.interactive() / max(pool.ready, 1)
        busy_s = max(0.0, _BUSY_S * (used - _BUSY)) if len(terms.tiers) == 1 else 0.0
        ttft_s = TTFT_IDLE_S + backlog_s + busy_s
        sight.demand.append(work)
        sight.ttft_s.append(ttft_s)
        sight.utilisation.append(used)
        sight.backlog_s.append(sum(queues.waiting) / max(pool.ready, 1))
        sight.ready, sight.booting, sight.asleep = pool.ready, pool.booting, pool.sleeping
        sight.backlog_work_s = queues.interactive()
        sight.deferred_work_s = sum(queues.waiting) - sight.backlog_work_s
        tiers_s = [TTFT_IDLE_S + it / max(pool.ready, 1) + busy_s for it in queues.ahead()]
        totals.add(work, ttft_s, tiers_s, pool)
        totals.changes += _decide(t, rule, sleeping, sight, pool, totals.minutes.most_ready)
    return totals.outcome(sight, queues)


def _decide(
    t: int,
    rule: ScalingRule,
    sleeping: SleepingRule | None,
    sight: Sight,
    pool: _Pool,
    most_ready: int,
) -> bool:
    """Call the policy if its interval has passed.

    Return whether the number of replicas changed.

    Args:
        t: Second of the run.
        rule: The scaling policy.
        sleeping: The same policy if it also decides about sleeping replicas. The caller checks this
            once, because an instance check of a protocol is slow.
        sight: Observations of the pool for the policy.
        pool: The simulated pool.
        most_ready: Greatest number of replicas that were ready in a minute so far.
    """
    terms = pool.terms
    if sleeping is not None and pool.sleeping:
        pool.wake(t, sleeping.woken(t, sight))
    if not t or t % rule.every_s:
        return False
    want = int(max(terms.replicas_min, min(terms.replicas_max, rule.target(t, sight))))
    share = round(terms.sleepers_share * max(most_ready, pool.ready))
    share = max(share, terms.sleepers_min)
    pool.scale(t, want, share if sleeping is None else sleeping.sleepers)
    return want != sight.provisioned


class Totals:
    """The totals of a simulation run."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._top_share = 1.0 if len(terms.tiers) == 1 else 1.0 - terms.tiers[-1]
        self._tiers = [_ViolatedMinutes(terms.objective_s) for _ in terms.tiers[:-1] or terms.tiers]
        self._paid_s = self._late = self._top_work = 0.0
        self.minutes = _Minutes(terms.objective_s)
        self.changes = 0

    def add(self, work: float, ttft_s: float, tiers_s: Sequence[float], pool: PaidPool) -> None:
        """Add one second, with the TTFT of all work and of each tier except batch."""
        self._paid_s += pool.paid
        self._late += self._top_share * work * (ttft_s > self._terms.objective_s)
        self._top_work += self._top_share * work
        self.minutes.add(ttft_s, pool)
        for count, tier_s in zip(self._tiers, tiers_s, strict=True):
            count.add(tier_s)

    def outcome(self, sight: Sight, queues: Queues) -> ScalingOutcome:
        """Return the result of the run."""
        return ScalingOutcome(
            violation_minutes=self.minutes.violated,
            violated_work_share=self._late / self._top_work if self._top_work else 0.0,
            gpu_hours=self._paid_s / 3600,
            changes=self.changes,
            ttft_max_s=max(sight.ttft_s),
            batch_late_share=queues.batch_late / queues.batch_work if queues.batch_work else 0.0,
            provisioned=tuple(self.minutes.provisioned),
            ready=tuple(self.minutes.ready),
            ttft_s=tuple(self.minutes.ttft_s),
            tier_minutes=tuple(count.violated for count in self._tiers),
            violated=tuple(self.minutes.are_violated),
        )


class _ViolatedMinutes:
    """Counts the minutes whose 99th percentile of TTFT misses the objective."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._open: list[float] = []
        self.violated = 0

    def add(self, ttft_s: float) -> float | None:
        """Add the TTFT of one second.

        The result is the greatest TTFT of a minute if the second completes the minute, otherwise
        None.
        """
        self._open.append(ttft_s)
        if len(self._open) < _MINUTE_S:
            return None
        ordered = sorted(self._open)
        # As in the benchmark, the percentile is interpolated between the two highest of sixty
        # values.
        at = (1 - _VIOLATED_SHARE) * (_MINUTE_S - 1)
        low = int(at)
        p99 = ordered[low] + (ordered[low + 1] - ordered[low]) * (at - low)
        self.violated += p99 > self._objective_s
        self._open.clear()
        return ordered[-1]


class _Minutes:
    """Collects the figures of a run per minute."""

    def __init__(self, objective_s: float) -> None:
        self._count = _ViolatedMinutes(objective_s)
        self.most_ready = 0
        self.provisioned: list[int] = []
        self.ready: list[int] = []
        self.ttft_s: list[float] = []
        self.are_violated: list[bool] = []

    @property
    def violated(self) -> int:
        return self._count.violated

    def add(self, ttft_s: float, pool: PaidPool) -> None:
        before = self._count.violated
        greatest_s = self._count.add(ttft_s)
        if greatest_s is None:
            return
        self.provisioned.append(pool.paid)
        self.ready.append(pool.ready)
        self.ttft_s.append(greatest_s)
        self.are_violated.append(self._count.violated > before)
        self.most_ready = max(self.most_ready, pool.ready)
