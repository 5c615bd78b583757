"""Demand of a pool that can grow no more goes to pools that serve the same model, once."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scaling.demand import BUCKET_S
from control_plane.scaling.model import (
    Cause,
    FleetBudget,
    PoolFacts,
    PoolPlan,
    PoolState,
    ScalingSettings,
)
from control_plane.scaling.plan import plan
from control_plane.scaling.sharing import others_of


def _pool(
    demand: float, most: int, *others: tuple[str, float], ready: int = 0, **settings: object
) -> PoolState:
    fixed = ScalingSettings(0, most, minute_worth=0.0, **settings)  # pyright: ignore[reportArgumentType]
    state = PoolState(fixed, PoolFacts(ready, 0, 0.0), others=others)
    for _ in range(48):
        state.history.add(demand)
    state.demand_at = 1000.0 if demand else -10_000.0
    return state


def _plans(**pools: PoolState) -> Mapping[str, PoolPlan]:
    return plan(pools, FleetBudget(), 1000.0 + BUCKET_S)


def test_a_pool_at_its_maximum_brings_the_first_replica_of_the_next_one() -> None:
    plans = _plans(own=_pool(10, 6, ("rented", 1.0)), rented=_pool(0, 20))
    assert plans["own"].wanted == 6
    assert 5 <= plans["rented"].wanted <= 6, "10 of work and its noise, less 6"
    last = plans["rented"].reasons[-1]
    assert (last.cause, last.replicas) == (Cause.SHARED, plans["rented"].wanted)
    assert "own" in last.text


def test_a_pool_that_still_grows_passes_nothing_on() -> None:
    plans = _plans(own=_pool(10, 40, ("rented", 1.0)), rented=_pool(0, 20))
    assert plans["own"].wanted >= 11
    assert plans["rented"].wanted == 0


def test_work_is_counted_in_the_replicas_of_the_pool_that_takes_it() -> None:
    slow, fast = (
        _plans(own=_pool(12, 6, ("other", ratio)), other=_pool(0, 50))["other"].wanted
        for ratio in (2.0, 0.5)
    )
    assert slow == pytest.approx(4 * fast, abs=3)


def test_the_cheapest_pool_takes_work_first_and_the_next_the_rest() -> None:
    pools = {"cheap": _pool(2, 5), "dear": _pool(0, 50)}
    plans = _plans(own=_pool(20, 10, ("cheap", 1.0), ("dear", 1.0)), **pools)
    assert plans["cheap"].wanted == 5
    taken = 5 - plans["cheap"].reasons[0].replicas
    left = plans["own"].reasons[0].replicas - 10 - taken
    assert plans["dear"].wanted == left


@pytest.mark.parametrize("hand", [{"pin": 1}, {"is_paused": True}], ids=["pinned", "paused"])
def test_a_pool_set_by_hand_takes_nothing_over_but_passes_on(hand: Mapping[str, object]) -> None:
    plans = _plans(own=_pool(10, 6, ("other", 1.0)), other=_pool(0, 20, ready=1, **hand))
    assert plans["other"].wanted == 1
    plans = _plans(own=_pool(10, 20, ("other", 1.0), ready=1, **hand), other=_pool(0, 20))
    assert plans["own"].wanted == 1
    assert plans["other"].wanted >= 9


def test_a_pool_with_unplaced_replicas_passes_their_work_on() -> None:
    own = _pool(10, 40, ("other", 1.0))
    own.facts = PoolFacts(2, 9, 0.0, unplaced=9, unplaced_s=3600.0)
    assert _plans(own=own, other=_pool(0, 20))["other"].wanted >= 7


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 20)), min_size=2, max_size=4),
    st.permutations(range(4)),
)
def test_no_more_is_asked_for_than_the_demand_of_all_and_no_bound_is_broken(rows, order) -> None:
    names = [f"p{number}" for number in range(len(rows))]
    alone, together = {}, {}
    for name, (demand, most) in zip(names, rows, strict=True):
        others = [(names[it], 1.0) for it in order if it < len(rows) and names[it] != name]
        alone[name] = _plans(**{name: _pool(demand, most)})[name]
        together[name] = _pool(demand, most, *others)
    plans = _plans(**together)
    asked = sum(it.reasons[0].replicas for it in alone.values())
    floor = sum(it.wanted for it in alone.values())
    assert sum(it.wanted for it in plans.values()) <= max(asked, floor) + len(rows)
    for name, (_, most) in zip(names, rows, strict=True):
        assert alone[name].wanted <= plans[name].wanted <= max(most, alone[name].wanted)


def test_the_others_of_a_pool_are_the_pools_of_its_models_by_price() -> None:
    lists = [[("a", 1.0), ("b", 3.0), ("c", 2.0)], [("a", 1.0), ("b", 0.5)], [("d", 1.0)]]
    found = others_of(lists, lambda key, other: None if other == "c" and key == "b" else 2.0)
    assert found["a"] == (("b", 2.0), ("c", 2.0))
    assert found["b"] == (("a", 2.0),)
    assert found["d"] == ()
