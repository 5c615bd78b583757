"""What users of other scalers complain about, as drills of our loop: reports, look, plan, replicas.

Each drill has the name of its thread. The world has requests as tokens, replicas that boot, and
routers that report as real ones do; time is virtual.
"""

from dataclasses import dataclass, field, replace

from control_plane.scaling.demand import DemandHistory
from control_plane.scaling.memory import Memory, PoolSight, look, without_effect_s
from control_plane.scaling.model import FleetBudget, PoolPlan, PoolState, ScalingSettings
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.work import CellWork, PoolSpeed

_LOOK_S = 15.0
_BOOT_S = 240.0
_TOKENS = 100  # of an answer
SPEED = PoolSpeed(1e-5, 0.01, 8)  # so that a request is one second of a replica
_TIER = 10


@dataclass
class World:
    """One pool: demand in requests per second, replicas, a queue, and what scaling remembers."""

    settings: ScalingSettings
    demand: float
    ready: int
    speed: PoolSpeed | None = SPEED
    boots: list[float] = field(default_factory=list)
    now: float = 1_000_000.0
    requests: float = 0.0
    queued: float = 0.0
    planned: int | None = None
    single_s: float = 0.2
    has_places: bool = True
    is_heard: bool = True
    unplaced_since: float = 0.0
    memory: Memory = field(default_factory=lambda: Memory(DemandHistory(bucket_s=_LOOK_S)))
    numbers: list[int] = field(default_factory=list)
    state: PoolState | None = None
    late_s: float = 0.0

    def see(self) -> PoolState:
        """Let a look's time pass, and look."""
        self.now += _LOOK_S
        came = [at for at in self.boots if at <= self.now]
        self.boots = [at for at in self.boots if at > self.now]
        self.ready += len(came)
        self.requests += self.demand * _LOOK_S
        self.queued = max(0.0, self.queued + (self.demand - self.ready) * _LOOK_S)
        requests, queued = int(self.requests), int(self.queued)
        report = CellWork(
            "cell router",
            1,
            {_TIER: (requests, 0, requests * _TOKENS, 0)},
            {_TIER: (queued, 0)} if queued else {},
            0,
            self.speed,
            self.single_s,
        )
        missing = 0 if self.has_places else max(0, (self.planned or 0) - self.ready)
        if missing and not self.unplaced_since:
            self.unplaced_since = self.now
        sight = PoolSight(
            (report,),
            frozenset({"cell router"}) if self.is_heard else frozenset(),
            unheard=0 if self.is_heard else 1,
            ready=self.ready,
            booting=len(self.boots),
            booted_s=[_BOOT_S] * len(came),
            planned=self.ready if self.planned is None else self.planned,
            unplaced=missing,
            unplaced_s=self.now - self.unplaced_since if missing else 0.0,
        )
        self.state = look(self.memory, sight, self.settings, self.speed, self.now)
        return self.state

    def take(self, decided: PoolPlan) -> None:
        """Do what was decided, as far as there are places."""
        assert self.state is not None
        remember(self.state, decided, self.now)
        self.late_s = without_effect_s(self.memory, self.state, decided.wanted, self.now)
        self.memory.demand_at = self.state.demand_at
        self.planned = decided.wanted
        self.numbers.append(decided.wanted)
        if self.has_places:
            missing = decided.wanted - self.ready - len(self.boots)
            self.boots += [self.now + _BOOT_S] * max(0, missing)
        surplus = max(0, self.ready + len(self.boots) - decided.wanted)
        kept = max(0, len(self.boots) - surplus)
        surplus -= len(self.boots) - kept
        del self.boots[kept:]
        self.ready -= surplus

    def run(self, minutes: float, budget: FleetBudget | None = None) -> PoolPlan:
        """Let the loop run; return the last plan."""
        decided: PoolPlan | None = None
        for _ in range(round(minutes * 60 / _LOOK_S)):
            state = self.see()
            decided = plan({"pool": state}, budget or FleetBudget(), self.now)["pool"]
            self.take(decided)
        assert decided is not None
        return decided


def _settings(least: int = 1, most: int = 40, **others: float | None) -> ScalingSettings:
    return replace(ScalingSettings(least, most, minute_worth=0.0), **others)  # pyright: ignore[reportArgumentType]


def test_dynamo_10528_time_in_the_queue_is_seen() -> None:
    """The planner met its objective on paper while users waited: it could not see the queue."""
    world = World(_settings(), demand=4.0, ready=6)
    world.run(20)
    world.queued = 600.0
    decided = plan({"pool": world.see()}, FleetBudget(), world.now)["pool"]
    assert decided.wanted > 20
    world.take(decided)
    world.run(15)
    assert world.queued == 0


def test_dynamo_9294_constant_load_does_not_oscillate() -> None:
    """Two replicas became one, the one was overloaded, and became two again."""
    world = World(_settings(), demand=1.2, ready=2)
    world.run(120)
    assert set(world.numbers) == {2}


def test_dynamo_12428_two_pools_share_a_budget_and_neither_waits_for_the_impossible() -> None:
    """Rebalancing prefill and decode broke the budget, then waited for pods that never start."""
    pools = {
        name: World(_settings(accelerators=1), demand, ready=4)
        for name, demand in (("prefill", 3.0), ("decode", 3.0))
    }
    budget = FleetBudget(accelerators=10)
    for minute in range(180):
        if minute == 40:
            pools["prefill"].demand, pools["decode"].demand = 1.2, 6.8
        if minute == 80:
            pools["prefill"].demand, pools["decode"].demand = 6.8, 1.2
        for _ in range(4):
            states = {name: world.see() for name, world in pools.items()}
            plans = plan(states, budget, next(iter(pools.values())).now)
            for name, world in pools.items():
                world.take(plans[name])
            assert sum(one.wanted for one in plans.values()) <= 10
            assert sum(it.ready + len(it.boots) for it in pools.values()) <= 10
    assert pools["prefill"].ready >= 7
    assert pools["prefill"].queued == 0


def test_dynamo_14251_without_a_place_it_is_told_and_goes_down_all_the_same() -> None:
    """No accelerator was to be had: stuck for an hour, and no way down either."""
    world = World(_settings(), demand=3.0, ready=4)
    world.run(20)
    world.has_places, world.demand = False, 12.0
    decided = world.run(40)
    assert any("found no place" in text for text in decided.warnings)
    assert world.late_s > 600
    world.queued, world.demand = 0.0, 1.0
    assert world.run(60).wanted <= 2
    assert world.ready <= 2


def test_dynamo_12430_a_pool_of_unmeasured_speed_keeps_its_number() -> None:
    """Samples of cold engines poisoned the capacity model; ours are not told before they are warm."""
    world = World(_settings(), demand=5.0, ready=6, speed=None)
    decided = world.run(30)
    assert decided.wanted == 6
    assert "is not measured yet" in decided.reasons[-1].text


def test_dynamo_11624_an_objective_that_one_request_misses_is_no_floor() -> None:
    """A floor came from an objective that no number of replicas can meet, and never decayed."""
    world = World(_settings(), demand=6.0, ready=8, single_s=4.0)
    decided = world.run(20)
    assert any("more replicas do not help" in text for text in decided.warnings)
    world.demand = 0.5
    assert world.run(60).wanted == 1


def test_dynamo_4420_a_number_set_by_hand_is_not_ignored() -> None:
    """A replica count that was edited by hand was taken back at once."""
    world = World(_settings(pin=9), demand=1.0, ready=2)
    world.run(30)
    assert set(world.numbers) == {9}
    world.settings = _settings()
    assert world.run(30).wanted == 2


def test_llm_d_router_2529_the_last_report_of_a_silent_router_expires() -> None:
    """The metric of a removed pod stayed frozen, and the pool never went down."""
    world = World(_settings(), demand=8.0, ready=10)
    world.run(30)
    world.queued, world.is_heard = 500.0, False
    before = world.planned
    world.run(30)
    assert world.planned == before, "what nobody knows moves nothing"
    # Its cell has another owner, who reports what is true now.
    world.is_heard, world.queued, world.demand = True, 0.0, 0.8
    assert world.run(60).wanted == 1


def test_llm_d_token_aware_the_speed_is_measured_and_not_a_constant() -> None:
    """One wrong constant asked for 8 replicas where 3 sufficed."""
    wrong = World(_settings(), demand=2.5, ready=3, speed=PoolSpeed(1e-5, 0.03, 8))
    wrong.run(30)
    asked = wrong.planned or 0
    speed = wrong.speed
    assert speed is not None
    for _ in range(40):  # looks, each with what engines have measured
        speed = speed.learned(SPEED)
    wrong.speed = speed
    assert wrong.run(60).wanted == 3 < asked


def test_an_outage_of_the_control_plane_is_no_jump_and_loses_no_demand() -> None:
    """Back after an hour: it looks first, goes down later than that, and knows what came meanwhile."""
    world = World(_settings(), demand=5.0, ready=7)
    world.run(60)
    before = world.planned
    world.memory = Memory.from_json(world.memory.as_json(), _LOOK_S)  # another process
    world.now += 3600
    world.requests += 3600 * 5.0
    world.demand = 1.0
    world.run(1)
    assert world.planned == before
    assert 4.5 < world.memory.history.days[-1] < 5.5
    assert world.run(4).wanted == before
    assert world.run(20).wanted == 2


def test_a_pool_at_its_maximum_has_its_work_done_by_a_rented_one_and_gives_it_back() -> None:
    """Two pools serve one model: gateways send to the second what the first cannot serve."""
    own = World(_settings(most=6), demand=4.0, ready=5)
    rented = World(_settings(0, 20, idle_s=300.0), demand=0.0, ready=0)
    pools = {"own": own, "rented": rented}

    def run(minutes: float, demand: float) -> None:
        for _ in range(round(minutes * 60 / _LOOK_S)):
            kept = own.ready * (0.95 if own.queued < own.ready else 0.5)  # a pool that waits
            spill = max(0.0, demand - kept) if rented.ready else 0.0
            own.demand, rented.demand = demand - spill, spill
            states = {name: world.see() for name, world in pools.items()}
            states["own"].others = (("rented", 1.0),)
            states["rented"].others = (("own", 1.0),)
            for name, decided in plan(states, FleetBudget(), own.now).items():
                pools[name].take(decided)

    run(60, 4.0)
    assert set(rented.numbers[-100:]) == {0}
    run(12, 10.0)
    assert rented.ready >= 4, "its first replicas come from the demand of the other pool"
    assert max(own.numbers) == 6
    run(60, 10.0)
    assert own.queued == rented.queued == 0
    settled = rented.numbers[-160:]
    assert max(settled) - min(settled) <= 1, "no oscillation between the two"
    assert own.ready + rented.ready <= 13
    run(60, 4.0)
    assert rented.ready == 0
