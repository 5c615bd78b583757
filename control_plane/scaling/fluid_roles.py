"""A fluid model of a pool with roles. Prompts wait for prefill, and answers wait for decode. Pure.

Work is an amount per second, as in `control_plane.scaling.fluid`. A request has work of both roles.
Its decode work begins to wait when its prompt has been computed. A replica changes its role without
a boot, and a sleeping replica may wake into either role.
"""

import random
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Protocol

from control_plane.scaling.fluid import (
    FIRST_UTILISATION,
    TTFT_IDLE_S,
    Queues,
    ScalingOutcome,
    Sight,
    Terms,
    Totals,
)
from control_plane.scaling.model import DECODE, PREFILL

_ROLES = (PREFILL, DECODE)
_FIRST_S = 300

RoleSights = Mapping[str, Sight]


class RoleRule(Protocol):
    """A scaling policy for both roles, which is called every `every_s` seconds.

    Attributes:
        sleepers: Number of replicas of the pool that should sleep.
    """

    every_s: int
    sleepers: int

    def targets(self, t: int, sights: RoleSights) -> Mapping[str, int]:
        """Return the number of replicas that each role should have at second `t`."""
        ...

    def woken(self, t: int, sights: RoleSights) -> Mapping[str, int]:
        """Return the number of sleeping replicas to wake for each role at second `t`."""
        ...


class _Replicas:
    """The replicas of both roles that serve, boot or wake up, and those that sleep."""

    def __init__(self, first: Mapping[str, int], terms: Terms, seed: int) -> None:
        self._terms = terms
        self._random = random.Random(seed)  # noqa: S311 -- boot times, no secrets
        self.of = dict(first)  # replicas that serve, by role
        self.sleeping = terms.sleepers_min
        self._boots: dict[str, list[float]] = {role: [] for role in _ROLES}
        self._wakes: dict[str, list[float]] = {role: [] for role in _ROLES}

    def booting(self, role: str) -> int:
        return len(self._boots[role]) + len(self._wakes[role])

    @property
    def ready(self) -> int:
        return sum(self.of.values())

    @property
    def paid(self) -> int:
        return self.ready + sum(map(self.booting, _ROLES)) + self.sleeping

    def tick(self, t: int) -> None:
        for coming in (self._boots, self._wakes):
            for role, times in coming.items():
                self.of[role] += sum(at <= t for at in times)
                times[:] = [at for at in times if at > t]

    def wake(self, t: int, role: str, count: int) -> int:
        woken = min(count, self.sleeping)
        self.sleeping -= woken
        self._wakes[role] += [t + self._random.uniform(*self._terms.wake_s) for _ in range(woken)]
        return woken

    def scale(self, t: int, wanted: Mapping[str, int], sleepers: int) -> None:
        """Change roles first. Then wake, boot, put to sleep and stop replicas."""
        for role, other in (_ROLES, _ROLES[::-1]):
            missing = wanted[role] - self.of[role] - self.booting(role)
            moved = min(max(0, missing), max(0, self.of[other] - wanted[other]))
            self.of[role] += moved
            self.of[other] -= moved
            missing = max(0, missing - moved)
            missing -= self.wake(t, role, missing)
            boots = (self._random.uniform(*self._terms.boot_s) for _ in range(missing))
            self._boots[role] += [t + boot_s for boot_s in boots]
        for role in _ROLES:
            surplus = max(0, self.of[role] + self.booting(role) - wanted[role])
            self._boots[role].sort()
            cancelled = min(surplus, len(self._boots[role]))
            del self._boots[role][len(self._boots[role]) - cancelled :]
            stopped = min(surplus - cancelled, self.of[role], self.ready - 1)
            self.of[role] -= stopped
            self.sleeping += min(stopped, max(0, sleepers - self.sleeping))
        self.sleeping = min(self.sleeping, sleepers)


class _Flow:
    """The work that waits: prompts, the answers behind them, and answers that may begin."""

    def __init__(self) -> None:
        self.prompts = self.behind = self.answers = 0.0

    def serve(self, came: Mapping[str, float], of: Mapping[str, int]) -> dict[str, float]:
        """Add the work of one second and serve it, and return the work done by role."""
        self.prompts += came[PREFILL]
        self.behind += came[DECODE]
        total = of[PREFILL] + of[DECODE]
        # If one role has no replica, the replicas of the other do both, prompts first.
        is_split = of[PREFILL] > 0 and of[DECODE] > 0
        prefilled = min(self.prompts, of[PREFILL] if is_split else total)
        released = self.behind * (prefilled / self.prompts if self.prompts else 1.0)
        self.prompts -= prefilled
        self.behind -= released
        self.answers += released
        decoded = min(self.answers, of[DECODE] if is_split else total - prefilled)
        self.answers -= decoded
        return {PREFILL: prefilled, DECODE: decoded}

    def waits_s(self, of: Mapping[str, int]) -> float:
        """Return the seconds until a request that comes now has its first token."""
        if of[PREFILL] > 0 and of[DECODE] > 0:
            return self.prompts / of[PREFILL] + self.answers / of[DECODE]
        return (self.prompts + self.answers) / max(1, sum(of.values()))


def play_roles(
    demand: Mapping[str, Sequence[float]], rule: RoleRule, terms: Terms, seed: int = 0
) -> ScalingOutcome:
    """Simulate one policy on the demand of both roles.

    Args:
        demand: Work-seconds per second by role, one value per second.
        rule: The scaling policy.
        terms: Parameters of the run, with one tier.
        seed: Seed of the random boot times.
    """
    pool, flow = _Replicas(_first(demand, terms), terms, seed), _Flow()
    sights = {role: Sight(demand[role]) for role in _ROLES}
    totals, both = Totals(terms), Sight(())
    for t, came in enumerate(zip(*(demand[role] for role in _ROLES), strict=True)):
        pool.tick(t)
        done = flow.serve(dict(zip(_ROLES, came, strict=True)), pool.of)
        ttft_s = TTFT_IDLE_S + flow.waits_s(pool.of)
        both.ttft_s.append(ttft_s)
        waiting = {PREFILL: flow.prompts, DECODE: flow.behind + flow.answers}
        for role, work in zip(_ROLES, came, strict=True):
            sight = sights[role]
            sight.demand.append(work)
            sight.utilisation.append(done[role] / max(1, pool.of[role]))
            sight.ready, sight.booting = pool.of[role], pool.booting(role)
            sight.asleep, sight.backlog_work_s = pool.sleeping, waiting[role]
        totals.add(sum(came), ttft_s, [ttft_s], pool)
        totals.changes += _decide(t, rule, sights, pool)
    return totals.outcome(both, Queues(terms))


def _first(demand: Mapping[str, Sequence[float]], terms: Terms) -> dict[str, int]:
    """Return the initial number of replicas of each role, within the bounds of the pool."""
    needs = {
        role: max(1, ceil(sum(curve[:_FIRST_S]) / _FIRST_S / FIRST_UTILISATION))
        for role, curve in demand.items()
    }
    total = min(max(sum(needs.values()), terms.replicas_min), terms.replicas_max)
    prefill = min(max(1, round(total * needs[PREFILL] / sum(needs.values()))), max(0, total - 1))
    return {PREFILL: prefill, DECODE: total - prefill}


def _decide(t: int, rule: RoleRule, sights: RoleSights, pool: _Replicas) -> bool:
    """Call the policy, and return whether the number of replicas changed."""
    if pool.sleeping:
        for role, count in rule.woken(t, sights).items():
            pool.wake(t, role, count)
    if not t or t % rule.every_s:
        return False
    wanted = rule.targets(t, sights)
    before = {role: pool.of[role] + pool.booting(role) for role in _ROLES}
    pool.scale(t, wanted, rule.sleepers)
    return any(wanted[role] != before[role] for role in _ROLES)
