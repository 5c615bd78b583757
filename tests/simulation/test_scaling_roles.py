"""A pool with roles in a fluid world: prompts wait for prefill, answers wait for decode."""

from dataclasses import dataclass, field, replace
from typing import Any

from control_plane.scaling.demand import DemandHistory
from control_plane.scaling.memory import Memory, PoolSight, look
from control_plane.scaling.model import (
    DECODE,
    PREFILL,
    FleetBudget,
    PoolPlan,
    PoolState,
    ScalingSettings,
)
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.roles import key_of
from control_plane.scaling.sleeping import wakes
from control_plane.scaling.work import CellWork, PoolSpeed

_LOOK_S = 15.0
_BOOT_S = 120.0
_SPEED = PoolSpeed(1e-4, 1e-3, 32)
_ROLES = (PREFILL, DECODE)


@dataclass
class SplitPool:
    """A pool whose replicas boot, serve one role, and change their role without a boot.

    Attributes:
        requests_s: Requests per second.
        prompt, output: Tokens of each request.
        waiting: Requests that wait for each role.
        boots: Times at which the booting replicas of each role are ready.
        asleep: Replicas that sleep. They have no role, and serve within one interval of looks.
        booted: Number of replicas that were started.
        waited_s: Seconds that requests waited, over all requests.
    """

    settings: ScalingSettings
    requests_s: float = 5.0
    prompt: int = 2000
    output: int = 1000
    ready: dict[str, int] = field(default_factory=lambda: {PREFILL: 2, DECODE: 6})
    waiting: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_ROLES, 0.0))
    boots: dict[str, list[float]] = field(default_factory=lambda: {role: [] for role in _ROLES})
    now: float = 1e6
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    planned: dict[str, int] = field(default_factory=dict)
    asleep: int = 0
    booted: int = 0
    waited_s: float = 0.0
    states: dict[str, PoolState] = field(default_factory=dict)
    memories: dict[str, Memory] = field(
        default_factory=lambda: {
            role: Memory(DemandHistory(bucket_s=_LOOK_S), role=role) for role in _ROLES
        }
    )

    def run(self, minutes: float, budget: FleetBudget | None = None) -> list[tuple[int, int]]:
        """Let the loop run, and return the planned numbers of each round."""
        rounds: list[tuple[int, int]] = []
        for _ in range(round(minutes * 60 / _LOOK_S)):
            self._wake()
            self._pass()
            self._take(self._plans(budget or FleetBudget()))
            rounds.append((self.planned[PREFILL], self.planned[DECODE]))
        return rounds

    def drift(self, prompt: int, output: int, minutes: int) -> list[tuple[int, int]]:
        """Change the tokens of requests evenly over time, and run for 20 minutes after that."""
        start, rounds = (self.prompt, self.output), list[tuple[int, int]]()
        for minute in range(1, minutes + 1):
            share = minute / minutes
            self.prompt = round(start[0] + share * (prompt - start[0]))
            self.output = round(start[1] + share * (output - start[1]))
            rounds += self.run(1)
        return rounds + self.run(20)

    def _pass(self) -> None:
        self.now += _LOOK_S
        came = self.requests_s * _LOOK_S
        tokens = (came, came * self.prompt, came * self.output)
        self.sums = [before + more for before, more in zip(self.sums, tokens, strict=True)]
        for role in _ROLES:  # a request reaches the role DECODE when it has been prefilled
            self.ready[role] += sum(at <= self.now for at in self.boots[role])
            self.boots[role] = [at for at in self.boots[role] if at > self.now]
            each_s = _SPEED.of_role(role).work_s(self.prompt, self.output)
            served = min(self.waiting[role] + came, self.ready[role] * _LOOK_S / each_s)
            self.waiting[role] += came - served
            self.waited_s += self.waiting[role] * _LOOK_S
            came = served

    def _wake(self) -> None:
        """Wake sleeping replicas for the queue, as a router's report does between two looks."""
        if not self.asleep or sum(self.waiting.values()) < 1:
            return
        kept = {role: memory.as_json() for role, memory in self.memories.items()}
        self.memories, memories = (
            {role: _restored(found, role) for role, found in kept.items()},
            self.memories,
        )
        self._look()
        self.memories = memories  # a wake writes no record
        keys = {key_of("pool", role): role for role in _ROLES}
        for key, count in wakes(self.states, set(keys), self.now).items():
            self.ready[keys[key]] += count
            self.planned[keys[key]] += count
            self.asleep -= count

    def _plans(self, budget: FleetBudget) -> dict[str, PoolPlan]:
        self._look()
        return plan(self.states, budget, self.now)

    def _look(self) -> None:
        requests, prompt, output = map(int, self.sums)
        queued = int(self.waiting[PREFILL] + self.waiting[DECODE])
        tiers = {10: (requests, prompt, output, 0)}
        waiting = {10: (queued, int(self.waiting[PREFILL] * self.prompt))} if queued else {}
        report = CellWork("cell router", 1, tiers, waiting, 0, _SPEED, 0.2)
        for role in _ROLES:
            sight = PoolSight(
                (report,),
                frozenset({report.key}),
                unheard=0,
                ready=self.ready[role],
                booting=len(self.boots[role]),
                planned=self.planned.get(role, self.ready[role]),
                asleep=self.asleep,
                sleepers=self.asleep,
            )
            state = look(self.memories[role], sight, self.settings, _SPEED, self.now)
            state.partner = key_of("pool", DECODE if role == PREFILL else PREFILL)
            self.states[key_of("pool", role)] = state

    def _take(self, plans: dict[str, PoolPlan]) -> None:
        """Change roles, and wake, boot, put to sleep and stop replicas, as the fleet does."""
        sleepers = plans[key_of("pool", DECODE)].asleep
        for role in _ROLES:
            key = key_of("pool", role)
            remember(self.states[key], plans[key], self.now)
            self.memories[role].demand_at = self.states[key].demand_at
            self.planned[role] = plans[key].wanted
        for role, other in (_ROLES, _ROLES[::-1]):
            missing = self.planned[role] - self.ready[role] - len(self.boots[role])
            moved = min(max(0, missing), max(0, self.ready[other] - self.planned[other]))
            self.ready[role] += moved
            self.ready[other] -= moved
            missing = max(0, missing - moved)
            woken = min(missing, self.asleep)
            self.asleep -= woken
            self.ready[role] += woken
            missing -= woken
            self.boots[role] += [self.now + _BOOT_S] * missing
            self.booted += missing
        for role in _ROLES:
            surplus = max(0, self.ready[role] + len(self.boots[role]) - self.planned[role])
            stopped = min(surplus, len(self.boots[role]))
            del self.boots[role][len(self.boots[role]) - stopped :]
            self.ready[role] -= surplus - stopped
            self.asleep += min(surplus - stopped, max(0, sleepers - self.asleep))
        self.booted += max(0, sleepers - self.asleep)
        self.asleep = sleepers


def _restored(kept: dict[str, Any], role: str) -> Memory:
    return Memory.from_json({PREFILL: kept} if role == PREFILL else kept, _LOOK_S, role)


_SETTINGS = ScalingSettings(2, 60, minute_worth=0.0, accelerators=4)


def _steady(settings: ScalingSettings = _SETTINGS) -> tuple[SplitPool, tuple[int, int]]:
    """Return a pool after an hour of constant demand, and its numbers of replicas."""
    pool = SplitPool(settings)
    rounds = pool.run(60)
    assert len(set(rounds[-60:])) == 1, "constant demand has constant numbers"
    return pool, rounds[-1]


def test_prompts_that_get_longer_boot_prefill_replicas_only() -> None:
    pool, (prefill, decode) = _steady()
    rounds = pool.drift(8000, pool.output, minutes=60)  # work of 4 replicas instead of 1
    assert max(it[1] for it in rounds) <= decode
    assert rounds[-1][0] >= max(5, prefill + 3)
    assert sum(pool.waiting.values()) < 1


def test_answers_that_get_longer_boot_decode_replicas_only() -> None:
    pool, (prefill, decode) = _steady()
    rounds = pool.drift(pool.prompt, 3000, minutes=60)  # work of 15 replicas instead of 5
    assert max(it[0] for it in rounds) <= prefill
    assert rounds[-1][1] >= max(16, decode + 9)
    assert sum(pool.waiting.values()) < 1


def test_prompts_that_are_suddenly_longer_grow_decode_only_while_their_queue_drains() -> None:
    pool, (prefill, decode) = _steady()
    pool.prompt *= 4
    rounds = pool.run(60)
    assert rounds[-1][0] >= prefill + 3
    assert rounds[-1][1] <= decode
    assert sum(pool.waiting.values()) < 1


def test_a_budget_is_kept_while_the_work_moves_between_the_roles() -> None:
    pool, _ = _steady()
    budget = FleetBudget(accelerators=4 * 14)
    numbers: list[tuple[int, int]] = []
    for prompt, output in ((12_000, 800), (2_000, 2_000), (12_000, 800), (2_000, 2_000)):
        pool.prompt, pool.output = prompt, output
        numbers += pool.run(45, budget)
        assert sum(pool.waiting.values()) < 1
    assert max(map(sum, numbers)) <= 14
    assert min(map(min, numbers)) >= 1


def test_work_that_moves_to_the_other_role_boots_few_replicas() -> None:
    pool, _ = _steady()
    pool.prompt, pool.output = 12_000, 800
    pool.run(60)
    booted = pool.booted
    numbers = pool.drift(4_000, 1_600, minutes=20)  # the same work in all
    assert numbers[-1][1] >= 9
    assert pool.booted - booted <= 8  # 10 without replicas that change their role


def _surge(sleepers: int) -> SplitPool:
    """Return a pool after a surge that doubled its demand for 15 minutes, and an hour of calm."""
    pool, _ = _steady(replace(_SETTINGS, sleepers_min=sleepers, sleepers_share=0.0))
    assert pool.asleep == sleepers
    pool.booted, pool.waited_s = 0, 0.0
    pool.requests_s *= 2
    pool.run(15)
    pool.requests_s /= 2
    pool.run(60)
    return pool


def test_sleepers_of_a_pool_with_roles_serve_a_surge_and_sleep_again() -> None:
    awake, sleepy = _surge(0), _surge(2)
    assert sleepy.asleep == 2
    assert sleepy.waited_s < 0.6 * awake.waited_s, (sleepy.waited_s, awake.waited_s)
    assert sleepy.booted <= awake.booted, "no replica boots only to sleep"


def test_a_pool_with_roles_sleeps_as_a_whole_and_wakes_by_its_first_requests() -> None:
    settings = replace(_SETTINGS, replicas_min=0, sleepers_min=2, sleepers_share=0.0)
    pool, _ = _steady(settings)
    pool.requests_s = 0.0
    pool.run(30)
    assert (pool.ready, pool.asleep) == ({PREFILL: 0, DECODE: 0}, 2)
    pool.booted, pool.requests_s = 0, 0.2
    pool.run(5)
    assert (pool.ready, pool.asleep) == ({PREFILL: 1, DECODE: 1}, 0)
    assert (pool.booted, sum(pool.waiting.values())) == (0, 0)
