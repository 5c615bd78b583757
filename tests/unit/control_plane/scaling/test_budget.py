"""The budget over all pools: pools sized by hand and rollouts use it first, in money too."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scaling.budget import FixedPool, left_of, price_of
from control_plane.scaling.model import FleetBudget, PoolFacts, PoolState, ScalingSettings
from control_plane.scaling.plan import plan


def test_a_pool_sized_by_hand_uses_the_budget_in_money() -> None:
    fixed = [FixedPool("own", 2, 4, 10.0), FixedPool("plain", 3, 2)]
    left = left_of(FleetBudget(price=100.0), fixed, accelerator_price=2.5)
    assert left == FleetBudget(price=100.0 - 2 * 10.0 - 3 * 2 * 2.5)


def test_a_pool_without_any_price_is_named() -> None:
    fixed = [FixedPool("free", 1, 4), FixedPool("empty", 0, 4), FixedPool("dear", 1, 4, 1.0)]
    assert left_of(FleetBudget(price=100.0), fixed, 0.0).unpriced == ("free",)
    assert left_of(FleetBudget(accelerators=100), fixed, 0.0).unpriced == ()


_FIXED = st.builds(
    FixedPool, st.just("pool"), st.integers(0, 50), st.integers(0, 8), st.floats(0, 20)
)


@given(st.lists(_FIXED, max_size=5), st.integers(0, 500), st.floats(0, 2000), st.floats(0, 5))
def test_scaled_pools_get_no_more_than_pools_by_hand_leave(
    fixed: list[FixedPool], accelerators: int, price: float, each: float
) -> None:
    left = left_of(FleetBudget(accelerators, price), fixed, each)
    settings = ScalingSettings(50, 50, accelerators=1, price=1.0)
    pools = {"pool": PoolState(settings, PoolFacts(0, 0, 0.0))}
    wanted = plan(pools, left, 0.0)["pool"].wanted
    taken = sum(it.replicas * it.accelerators for it in fixed)
    cost = sum(it.replicas * price_of(it.price, it.accelerators, each) for it in fixed)
    assert wanted == 0 or taken + wanted <= accelerators
    assert wanted == 0 or cost + wanted <= price + 1e-6


def test_replicas_that_rollouts_need_leave_less_for_other_pools() -> None:
    rolled = ScalingSettings(6, 6, accelerators=1, rollout_replicas=6)
    other = ScalingSettings(6, 6, accelerators=1)
    pools = {
        "rolled": PoolState(rolled, PoolFacts(0, 6, 0.0)),
        "other": PoolState(other, PoolFacts(0, 6, 0.0)),
    }
    plans = plan(pools, FleetBudget(accelerators=8), 0.0)
    assert {key: it.wanted for key, it in plans.items()} == {"rolled": 6, "other": 2}


@pytest.mark.parametrize(("accelerators", "leaving", "has_room"), [(4, 0, 0), (5, 0, 1), (5, 1, 0)])
def test_a_plan_tells_whether_the_budget_has_room_for_a_move(
    accelerators: int, leaving: int, has_room: int
) -> None:
    facts = PoolFacts(4, 0, 0.0, placed=4, leaving=leaving)
    pools = {"pool": PoolState(ScalingSettings(4, 4, accelerators=1), facts)}
    found = plan(pools, FleetBudget(accelerators=accelerators), 0.0)["pool"]
    assert (found.wanted, found.has_room) == (4, bool(has_room))


def test_a_pool_without_a_place_lends_its_part_of_a_scarce_budget_and_takes_no_more() -> None:
    stuck = PoolFacts(2, 0, 0.0, unplaced=8, unplaced_s=3600.0, placed=2)
    pools = {
        "stuck": PoolState(ScalingSettings(10, 10, accelerators=1), stuck),
        "other": PoolState(ScalingSettings(6, 6, accelerators=1), PoolFacts(1, 0, 0.0, placed=1)),
    }
    plans = plan(pools, FleetBudget(accelerators=10), 0.0)
    assert {key: it.wanted for key, it in plans.items()} == {"stuck": 3, "other": 6}
    assert plans["stuck"].reasons[-1].text.endswith("7 replicas without a place")
    free = plan(pools, FleetBudget(accelerators=16), 0.0)
    assert free["stuck"].wanted == 10, "an ample budget is not lent"
