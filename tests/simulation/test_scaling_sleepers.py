"""A pool whose replicas may all sleep, in the loop of looks, plans and wakes; time is virtual."""

from dataclasses import dataclass, field

from control_plane.scaling.demand import DemandHistory
from control_plane.scaling.memory import Memory, PoolSight, look
from control_plane.scaling.model import FleetBudget, PoolState, ScalingSettings
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.sleeping import urgent
from control_plane.scaling.work import CellWork, PoolSpeed

_LOOK_S = 15.0
_TOKENS = 100
_SPEED = PoolSpeed(1e-5, 0.01, 8)  # so that a request is one second of a replica
_IDLE_S = 900.0


@dataclass
class Sleepy:
    """One pool with one replica, which wakes and falls asleep between two looks."""

    ready: int = 1
    asleep: int = 0
    speed: PoolSpeed | None = _SPEED
    settings: ScalingSettings = field(
        default_factory=lambda: ScalingSettings(0, 8, sleepers_min=1, idle_s=_IDLE_S)
    )
    now: float = 1_000_000.0
    requests: int = 0
    planned: int = 1
    memory: Memory = field(default_factory=lambda: Memory(DemandHistory(bucket_s=_LOOK_S)))
    boots: int = 0  # replicas that were started
    most: int = 0  # greatest number of replicas at the same time

    def see(self, memory: Memory, queued: int) -> PoolState:
        sums = {10: (self.requests, 0, self.requests * _TOKENS, 0)}
        waiting = {10: (queued, 0)} if queued else {}
        report = CellWork("cell router", 1, sums, waiting, 0, self.speed, 0.2)
        sight = PoolSight(
            (report,),
            frozenset({"cell router"}),
            unheard=0,
            ready=self.ready,
            booting=0,
            planned=self.planned,
            asleep=self.asleep,
            sleepers=self.asleep,
        )
        return look(memory, sight, self.settings, self.speed, self.now)

    def run(self, minutes: float, requests: int = 0) -> None:
        """Let the loop run, with some requests at the beginning of each interval of looks."""
        for _ in range(round(minutes * 60 / _LOOK_S)):
            self.requests += requests
            if requests and not self.ready:
                copy = Memory.from_json(self.memory.as_json(), _LOOK_S)  # a wake writes no record
                woken = urgent(self.see(copy, requests), self.now)
                assert woken, "the first request wakes the sleeper"
                self.planned, self.ready, self.asleep = woken, woken, self.asleep - woken
            self.now += _LOOK_S
            state = self.see(self.memory, 0)
            decided = plan({"pool": state}, FleetBudget(), self.now)["pool"]
            remember(state, decided, self.now)
            self.memory.demand_at = state.demand_at
            self.boots += max(0, decided.wanted + decided.asleep - self.ready - self.asleep)
            self.planned = self.ready = decided.wanted
            self.asleep = decided.asleep
            self.most = max(self.most, self.ready + self.asleep)


def test_visits_wake_the_sleeper_and_no_replica_boots_beside_it() -> None:
    pool = Sleepy()
    pool.run(20)
    for visit in (0.25, 1.0, 5.0, 10.0):
        assert (pool.ready, pool.asleep) == (0, 1)
        pool.run(visit, requests=2)
        assert pool.ready == 1
        pool.run(40)
    assert (pool.ready, pool.asleep, pool.boots, pool.most) == (0, 1, 0, 1)


def test_a_pool_with_lasting_demand_gets_another_sleeper_once() -> None:
    pool = Sleepy()
    pool.run(20)
    pool.run(_IDLE_S / 60, requests=2)
    assert pool.boots == 0
    pool.run(120, requests=2)
    assert (pool.ready, pool.asleep, pool.boots) == (1, 1, 1)


def test_a_pool_that_never_had_a_request_sleeps_after_its_idle_time() -> None:
    pool = Sleepy(speed=None)
    pool.run(_IDLE_S / 60 - 1)
    assert (pool.ready, pool.asleep) == (1, 0)
    pool.run(2)
    assert (pool.ready, pool.asleep, pool.boots) == (0, 1, 0)
    pool.run(1, requests=1)
    assert pool.ready == 1, "it wakes although its speed is unknown"


def test_a_pool_without_sleepers_that_never_had_a_request_stops() -> None:
    pool = Sleepy(speed=None, settings=ScalingSettings(0, 8, idle_s=_IDLE_S))
    pool.run(_IDLE_S / 60 + 1)
    assert (pool.ready, pool.asleep) == (0, 0)
