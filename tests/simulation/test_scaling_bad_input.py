"""Wrong facts in the loop of looks and plans: no budget breaks, and no replica that serves goes.

`test_plan.py` has a minimum beyond the budget, `test_nodes.py` an actuator that does nothing or too
much, `test_demand.py` yesterday's outage, and `test_scaling_actuators.py` a webhook that hangs.
"""

import pytest

from control_plane.fleet.model import Accelerator, Needs, Node, Pool, Replica, ReplicaState
from control_plane.fleet.planner import plan_replicas
from control_plane.scaling.model import FleetBudget, PoolPlan, ScalingSettings
from control_plane.scaling.plan import plan
from tests.simulation.test_scaling_complaints import World

_GIB = 1 << 30


class _Lied(World):
    """A world whose new replicas fail at their start, because their node lacks the memory."""

    def take(self, decided: PoolPlan) -> None:
        super().take(decided)
        self.boots.clear()


def _settings(**others: float) -> ScalingSettings:
    return ScalingSettings(1, 40, minute_worth=0.0, accelerators=1, **others)  # pyright: ignore[reportArgumentType]


def test_a_node_that_lies_about_its_memory_costs_no_budget_and_no_replica_that_serves() -> None:
    lied, other = _Lied(_settings(), demand=3.0, ready=4), World(_settings(), 3.0, ready=4)
    budget = FleetBudget(accelerators=14)

    def run(minutes: int) -> PoolPlan:
        for _ in range(minutes * 4):
            states = {"lied": lied.see(), "other": other.see()}
            plans = plan(states, budget, lied.now)
            assert sum(it.wanted for it in plans.values()) <= 14
            lied.take(plans["lied"])
            other.take(plans["other"])
        return plans["lied"]  # pyright: ignore[reportPossiblyUnboundVariable]

    run(20)
    lied.demand = 9.0
    run(40)
    assert lied.late_s > 600, "replicas that never come are told"
    assert (lied.ready, other.ready, other.queued) == (4, 4, 0)
    lied.demand = lied.queued = 1.0
    assert run(60).wanted == 2


def test_a_replica_that_failed_on_a_lying_node_goes_before_a_serving_one() -> None:
    gib = (Accelerator(0, 80 * _GIB), Accelerator(1, 80 * _GIB))
    nodes = [Node(name, frozenset({"sim"}), False, accelerators=gib) for name in ("true", "lies")]
    ready, failed = ReplicaState.READY, ReplicaState.FAILED
    replicas = [
        Replica("r1", "p", "c", "lies", state=failed),
        Replica("r2", "p", "c", "lies", state=failed),
        Replica("r3", "p", "c", "true", state=ready),
        Replica("r4", "p", "c", "true", state=ready),
    ]
    cells = {"p": ["c"]}

    def changes(wanted: int):
        pool = Pool("p", "sim", wanted, needs=Needs(accelerators=1))
        return plan_replicas([pool], cells, nodes, replicas, lambda: "r5")

    assert changes(4).create == (), "a replica that fails is not replaced by one more"
    assert {*changes(2).drain, *changes(2).forget} == {"r1", "r2"}


@pytest.mark.parametrize("jump_s", [-3600.0, -300.0, -20.0])
def test_a_clock_that_is_set_back_moves_no_number(jump_s: float) -> None:
    world = World(_settings(), demand=5.0, ready=7)
    world.run(60)
    before = world.planned
    world.now += jump_s
    world.run(30)
    assert set(world.numbers[-120:]) == {before}
    world.demand = 1.0
    assert world.run(60 - jump_s / 60).wanted == 2


def test_a_clock_that_is_set_forward_stops_no_replica() -> None:
    world = World(_settings(), demand=5.0, ready=7)
    world.run(60)
    before = world.planned or 0
    world.now += 300.0
    world.run(60)
    assert min(world.numbers[-240:]) == before == world.numbers[-1]
