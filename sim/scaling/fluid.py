"""Plays a curve of demand through a fluid model of one pool, second by second.

One ready replica does one work-second per second. A booting replica is paid for. First-token time
is 0.15 s, plus the backlog per ready replica, plus up to 0.3 s above 90 % utilisation.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

TTFT_OBJECTIVE_S = 1.5
_TTFT_IDLE_S = 0.15
_BUSY, _BUSY_S = 0.9, 3.0  # seconds per utilisation above it
_MINUTE_S = 60
_VIOLATED_SHARE = 0.01  # a minute is violated if its 99th percentile is
FIRST_UTILISATION = 0.7  # of the replicas that a run begins with
_FIRST_S = 300


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of a run.

    Attributes:
        boot_s: Least and greatest seconds that a replica takes to boot, each as likely.
        replicas_min: Replicas that a policy may not go below.
        replicas_max: Replicas that a policy may not go above.
        objective_s: First-token objective in seconds.
        sleepers_share: Sleepers per replica of the busiest minute so far; they are paid for.
        wake_s: Least and greatest seconds that a sleeper takes to wake.
        tiers: Shares of the demand by tier, the highest first; together 1.
        batch_deadline_s: Seconds that work of the lowest of several tiers may wait.
    """

    boot_s: tuple[float, float] = (180.0, 300.0)
    replicas_min: int = 1
    replicas_max: int = 400
    objective_s: float = TTFT_OBJECTIVE_S
    sleepers_share: float = 0.0
    wake_s: tuple[float, float] = (1.0, 6.0)
    tiers: tuple[float, ...] = (1.0,)
    batch_deadline_s: float = 900.0


@dataclass(slots=True)
class Sight:
    """The pool as a scaling policy sees it.

    Attributes:
        demand: Work-seconds that came in each second so far.
        ttft_s: First-token time of each second.
        utilisation: Share of the ready replicas' time that was used in each second.
        backlog_s: Work-seconds waiting per ready replica at the end of each second.
        ready: Replicas that serve.
        booting: Replicas that boot.
        future: The whole curve; for the oracle alone.
    """

    future: Sequence[float]
    demand: list[float] = field(default_factory=list[float])
    ttft_s: list[float] = field(default_factory=list[float])
    utilisation: list[float] = field(default_factory=list[float])
    backlog_s: list[float] = field(default_factory=list[float])
    ready: int = 0
    booting: int = 0

    @property
    def provisioned(self) -> int:
        """Replicas that are paid for."""
        return self.ready + self.booting


class ScalingRule(Protocol):
    """A scaling policy; it looks every `every_s` seconds."""

    every_s: int

    def target(self, t: int, sight: Sight) -> float:
        """Return how many replicas there should be at second `t`."""
        ...


@dataclass(frozen=True, slots=True)
class ScalingOutcome:
    """The result of a policy on one curve.

    Attributes:
        violation_minutes: Minutes whose 99th percentile of first-token time misses the objective.
        violated_work_share: Share of the work that came while first tokens missed the objective.
        gpu_hours: Hours of all replicas that were paid for.
        changes: Times at which the policy changed the number of replicas.
        ttft_max_s: Longest first-token time.
        batch_late_share: Share of the lowest tier's work that waited beyond its deadline.
        provisioned: Replicas that were paid for, one per minute.
        ready: Replicas that served, one per minute.
        ttft_s: Greatest first-token time, one per minute.
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


class _Queues:
    """Work that waits by tier, the highest served first; the lowest of several is batch."""

    def __init__(self, terms: Terms) -> None:
        self._shares = terms.tiers
        self._deadline_s = terms.batch_deadline_s
        self.waiting = [0.0] * len(terms.tiers)
        self._batch: list[tuple[int, float]] = []  # second of arrival, work
        self.batch_late = self.batch_work = 0.0

    def add(self, t: int, work: float) -> None:
        for tier, share in enumerate(self._shares):
            self.waiting[tier] += share * work
        if len(self._shares) > 1:
            self.batch_work += self._shares[-1] * work
            self._batch.append((t, self._shares[-1] * work))

    def serve(self, t: int, capacity: float) -> float:
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
        """Return the work that waits in every tier but batch."""
        return self.waiting[0] if len(self.waiting) == 1 else sum(self.waiting[:-1])


class _Pool:
    """Replicas that serve, boot, sleep and wake."""

    def __init__(self, first: int, terms: Terms, seed: int) -> None:
        self._terms = terms
        self._random = random.Random(seed)  # noqa: S311 -- boot times, no secrets
        self.ready, self.sleeping = first, 0
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

    def scale(self, t: int, want: int, sleepers: int) -> None:
        have = self.ready + self.booting
        missing = want - have
        if missing > 0:
            woken = min(missing, self.sleeping)
            self.sleeping -= woken
            self._wakes += [t + self._random.uniform(*self._terms.wake_s) for _ in range(woken)]
            boots = (self._random.uniform(*self._terms.boot_s) for _ in range(missing - woken))
            self._boots += [t + boot_s for boot_s in boots]
        elif missing < 0:
            self._boots.sort()
            cancelled = min(-missing, len(self._boots))
            del self._boots[len(self._boots) - cancelled :]
            stopped = min(-missing - cancelled, self.ready - 1)
            self.ready -= stopped
            self.sleeping += min(stopped, max(0, sleepers - self.sleeping))


def play(demand: Sequence[float], rule: ScalingRule, terms: Terms, seed: int = 0) -> ScalingOutcome:
    """Play one curve.

    Args:
        demand: Work-seconds per second, one value per second.
        rule: The policy.
        terms: Terms of the run.
        seed: Seed of the boot times.
    """
    first = max(terms.replicas_min, 1, ceil(sum(demand[:_FIRST_S]) / _FIRST_S / FIRST_UTILISATION))
    if (own := getattr(rule, "replicas", None)) is not None:
        first = own
    pool, queues, sight = (
        _Pool(min(first, terms.replicas_max), terms, seed),
        _Queues(terms),
        Sight(demand),
    )
    minutes = _Minutes(terms.objective_s)
    paid_s = late = top_work = 0.0
    changes = 0
    top_share = 1.0 if len(terms.tiers) == 1 else 1.0 - terms.tiers[-1]
    for t, work in enumerate(demand):
        pool.tick(t)
        queues.add(t, work)
        done = queues.serve(t, pool.ready)
        used = done / max(pool.ready, 1)
        backlog_s = queues.interactive() / max(pool.ready, 1)
        busy_s = max(0.0, _BUSY_S * (used - _BUSY)) if len(terms.tiers) == 1 else 0.0
        ttft_s = _TTFT_IDLE_S + backlog_s + busy_s
        sight.demand.append(work)
        sight.ttft_s.append(ttft_s)
        sight.utilisation.append(used)
        sight.backlog_s.append(sum(queues.waiting) / max(pool.ready, 1))
        sight.ready, sight.booting = pool.ready, pool.booting
        paid_s += pool.paid
        late += top_share * work * (ttft_s > terms.objective_s)
        top_work += top_share * work
        minutes.add(ttft_s, pool)
        if t and t % rule.every_s == 0:
            want = int(max(terms.replicas_min, min(terms.replicas_max, rule.target(t, sight))))
            changes += want != sight.provisioned
            pool.scale(t, want, round(terms.sleepers_share * max(minutes.most_ready, pool.ready)))
    return ScalingOutcome(
        violation_minutes=minutes.violated,
        violated_work_share=late / top_work,
        gpu_hours=paid_s / 3600,
        changes=changes,
        ttft_max_s=max(sight.ttft_s),
        batch_late_share=queues.batch_late / queues.batch_work if queues.batch_work else 0.0,
        provisioned=tuple(minutes.provisioned),
        ready=tuple(minutes.ready),
        ttft_s=tuple(minutes.ttft_s),
    )


class _Minutes:
    """Figures by minute."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._open: list[float] = []
        self.violated = self.most_ready = 0
        self.provisioned: list[int] = []
        self.ready: list[int] = []
        self.ttft_s: list[float] = []

    def add(self, ttft_s: float, pool: _Pool) -> None:
        self._open.append(ttft_s)
        if len(self._open) < _MINUTE_S:
            return
        ordered = sorted(self._open)
        # The yardstick interpolates its percentile between the two highest of sixty values.
        at = (1 - _VIOLATED_SHARE) * (_MINUTE_S - 1)
        low = int(at)
        p99 = ordered[low] + (ordered[low + 1] - ordered[low]) * (at - low)
        self.violated += p99 > self._objective_s
        self.provisioned.append(pool.paid)
        self.ready.append(pool.ready)
        self.ttft_s.append(ordered[-1])
        self.most_ready = max(self.most_ready, pool.ready)
        self._open.clear()
