"""The two roles of a pool: each follows its own demand, and both stay within bounds and budget."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scaling.demand import BUCKET_S
from control_plane.scaling.model import (
    DECODE,
    PREFILL,
    Cause,
    FleetBudget,
    PoolFacts,
    PoolPlan,
    PoolState,
    ScalingSettings,
)
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.roles import key_of, sleepers_split
from control_plane.scaling.sleeping import sleepers_of, wakes
from control_plane.scaling.work import PoolSpeed

P, D = key_of("pool", PREFILL), key_of("pool", DECODE)
SPEED = PoolSpeed(1e-4, 1e-3, 32)
_SETTINGS = ScalingSettings(2, 40, minute_worth=0.0)
_NOW = 1e6


def _pair(
    prefill: float,
    decode: float,
    settings: ScalingSettings = _SETTINGS,
    have: tuple[int, int] = (1, 1),
    minutes: int = 30,
) -> dict[str, PoolState]:
    """Return the states of both roles after a constant demand, in work-seconds per second."""
    states: dict[str, PoolState] = {}
    for role, demand, ready in ((PREFILL, prefill, have[0]), (DECODE, decode, have[1])):
        state = PoolState(settings, PoolFacts(ready, 0, 0.0), role=role)
        state.partner = key_of("pool", DECODE if role == PREFILL else PREFILL)
        for _ in range(int(minutes * 60 / BUCKET_S)):
            state.history.add(demand)
        states[key_of("pool", role)] = state
    return states


def _wanted(states: dict[str, PoolState], budget: FleetBudget | None = None) -> tuple[int, int]:
    plans = plan(states, budget or FleetBudget(), _NOW)
    return plans[P].wanted, plans[D].wanted


def test_the_work_of_a_role_is_its_own_tokens() -> None:
    requests, prompt, output = 10, 2000, 50
    tokens = (requests * prompt, requests * output)
    parts = [SPEED.of_role(role).work_s(*tokens) for role in (PREFILL, DECODE)]
    assert parts == pytest.approx([2.0, 0.5])
    assert sum(parts) == pytest.approx(SPEED.work_s(*tokens))
    assert SPEED.of_role("") == SPEED


def test_long_prompts_grow_only_the_prefill_role() -> None:
    before = _wanted(_pair(3.0, 6.0))
    after = _wanted(_pair(9.0, 6.0))
    assert after[0] >= before[0] + 5
    assert after[1] == before[1]


def test_long_answers_grow_only_the_decode_role() -> None:
    before = _wanted(_pair(3.0, 6.0))
    after = _wanted(_pair(3.0, 14.0))
    assert after[0] == before[0]
    assert after[1] >= before[1] + 7


def test_a_role_without_work_keeps_one_replica_while_the_other_serves() -> None:
    assert _wanted(_pair(0.0, 6.0))[0] == 1
    assert _wanted(_pair(6.0, 0.0))[1] == 1


def test_an_idle_pool_without_a_minimum_stops_both_roles() -> None:
    assert _wanted(_pair(0.0, 0.0, replace(_SETTINGS, replicas_min=0))) == (0, 0)


def test_a_pool_of_one_replica_has_no_separate_roles() -> None:
    assert _wanted(_pair(3.0, 3.0, ScalingSettings(1, 1))) == (0, 1)


def test_the_maximum_of_a_pool_is_shared_in_the_ratio_of_the_demands() -> None:
    states = _pair(20.0, 60.0)
    assert _wanted(states) == (10, 30)
    reasons = plan(states, FleetBudget(), _NOW)[P].reasons
    assert (reasons[-1].cause, reasons[-1].replicas) == (Cause.MAXIMUM, 10)


def test_the_minimum_of_a_pool_goes_to_the_role_with_the_least_room() -> None:
    prefill, decode = _wanted(_pair(1.0, 5.0, replace(_SETTINGS, replicas_min=18)))
    assert prefill + decode == 18
    assert decode > 2 * prefill


def test_the_bounds_of_a_role_are_kept() -> None:
    states = _pair(9.0, 6.0)
    states[P].settings = replace(_SETTINGS, role_max=4)
    states[D].settings = replace(_SETTINGS, role_min=12)
    assert _wanted(states) == (4, 12)


def test_a_number_set_by_hand_is_the_sum_of_the_roles_or_names_both() -> None:
    assert _wanted(_pair(3.0, 9.0, replace(_SETTINGS, pin=8))) == (2, 6)
    assert _wanted(_pair(3.0, 9.0, replace(_SETTINGS, pin=8, pin_prefill=5))) == (5, 3)
    assert _wanted(_pair(3.0, 9.0, replace(_SETTINGS, pin=8, pin_prefill=8))) == (7, 1)
    over = _pair(3.0, 9.0, replace(_SETTINGS, pin=8, pin_until=_NOW - 1))
    assert sum(_wanted(over)) > 8


def test_a_paused_pool_keeps_both_roles() -> None:
    assert _wanted(_pair(3.0, 9.0, replace(_SETTINGS, is_paused=True), (7, 2))) == (7, 2)


def test_a_growing_role_takes_held_replicas_of_the_other_role() -> None:
    states = _pair(2.0, 6.0, have=(8, 7))
    held = PoolPlan(8, 8.0, ())
    remember(states[P], held, _NOW - 60)
    assert _wanted(states) == (8, 7)
    growing = _pair(2.0, 10.0, have=(8, 7))
    growing[P].asks = list(states[P].asks)
    prefill, decode = _wanted(growing)
    assert decode >= 11
    assert prefill == 8 - (decode - 7)


def test_a_scarce_budget_leaves_both_roles() -> None:
    settings = replace(_SETTINGS, accelerators=4, price=3.0)
    assert _wanted(_pair(2.0, 12.0, settings, (0, 9)), FleetBudget(accelerators=20)) == (1, 8)
    prefill, decode = _wanted(_pair(6.0, 6.0, settings, (0, 0)), FleetBudget(price=15.0))
    assert (prefill + decode, min(prefill, decode)) == (5, 2)


_ROWS = st.lists(
    st.tuples(
        st.integers(0, 5),  # minimum of the pool
        st.integers(1, 30),  # maximum of the pool
        st.integers(0, 8),  # accelerators
        st.floats(0, 10),  # price
        st.tuples(st.floats(0, 30), st.floats(0, 30)),  # demand of both roles
        st.tuples(st.integers(0, 10), st.integers(0, 10)),  # ready replicas of both roles
        st.sampled_from([None, 0, 1, 7]),  # number set by hand
    ),
    min_size=1,
    max_size=4,
)


@given(_ROWS, st.integers(0, 300), st.floats(0, 500))
def test_roles_and_pools_stay_within_bounds_and_budget(
    rows: list[tuple[int, int, int, float, tuple[float, float], tuple[int, int], int | None]],
    accelerators: int,
    price: float,
) -> None:
    pools: dict[str, PoolState] = {}
    for number, (least, most, each, cost, demand, have, pin) in enumerate(rows):
        settings = ScalingSettings(least, most, accelerators=each, price=cost, pin=pin)
        for key, state in _pair(*demand, settings, have, minutes=2).items():
            state.partner = state.partner.replace("pool", str(number))
            pools[key.replace("pool", str(number))] = state
    free = plan(pools, FleetBudget(), _NOW)
    bound = plan(pools, FleetBudget(accelerators, price), _NOW)
    for number, (least, most, *_, pin) in enumerate(rows):
        keys = [key_of(str(number), role) for role in (PREFILL, DECODE)]
        high, low = max(least, most), least
        if pin is not None:
            low = high = pin
        assert low <= sum(free[key].wanted for key in keys) <= high
        for plans in (free, bound):
            prefill, decode = (plans[key].wanted for key in keys)
            assert (prefill > 0) == (prefill + decode > 1)
            assert (decode > 0) == (prefill + decode > 0)

    def of(counts: dict[str, int]) -> tuple[float, float]:
        return (
            sum(pools[key].settings.accelerators * count for key, count in counts.items()),
            sum(pools[key].settings.price * count for key, count in counts.items()),
        )

    used = of({key: decided.wanted for key, decided in bound.items()})
    served = of({key: min(pools[key].facts.ready, free[key].wanted) for key in pools})
    assert used[0] <= max(accelerators, served[0])
    assert used[1] <= max(price, served[1]) * (1 + 1e-9)


_SLEEPY = ScalingSettings(2, 40, minute_worth=0.0, sleepers_share=0.1, sleepers_min=1)


def _with(states: dict[str, PoolState], **facts: float) -> dict[str, PoolState]:
    """Return the states with the same facts of the pool in both roles."""
    for state in states.values():
        state.facts = replace(state.facts, **facts)  # pyright: ignore[reportArgumentType]
    return states


def test_the_sleepers_are_a_share_of_both_roles_together() -> None:
    states = _pair(4.0, 15.0, _SLEEPY, have=(6, 19))
    assert sleepers_of(list(states.values())) == 2
    plans = plan(states, FleetBudget(), _NOW)
    assert (plans[P].asleep, plans[D].asleep) == (0, 2), "sleepers have no role"
    assert sleepers_of(list(_pair(0.0, 0.0, _SLEEPY).values())) == 1


def test_a_replica_that_a_role_no_longer_needs_sleeps_instead_of_stopping() -> None:
    states = _with(_pair(1.0, 3.0, _SLEEPY, have=(4, 6)), asleep=0, sleepers=0)
    plans = plan(states, FleetBudget(), _NOW)
    assert plans[P].wanted + plans[D].wanted <= 8
    assert plans[D].asleep == 1
    need = plans[P].wanted + plans[D].wanted
    within_budget = plan(states, FleetBudget(price=0.0, accelerators=need), _NOW)
    assert within_budget[D].asleep == 1, "without accelerators and price a sleeper is free"
    for state in states.values():
        state.settings = replace(_SLEEPY, accelerators=1)
    assert plan(states, FleetBudget(accelerators=need), _NOW)[D].asleep == 0


@pytest.mark.parametrize(("prefill", "decode", "role"), [(3.9, 2.0, P), (1.0, 5.9, D)])
def test_a_queue_wakes_sleepers_for_the_role_it_waits_for(
    prefill: float, decode: float, role: str
) -> None:
    states = _with(
        _pair(prefill, decode, _SLEEPY, have=(4, 6)), backlog_work_s=20.0, asleep=3, sleepers=3
    )
    assert wakes(states, {P, D}, _NOW) == {role: 2}
    _with(states, backlog_work_s=500.0)
    assert wakes(states, {P, D}, _NOW) == {role: 3}
    for state in states.values():
        state.settings = replace(_SLEEPY, replicas_max=11)
    assert wakes(states, {P, D}, _NOW) == {role: 1}, "the bounds of the pool are kept"


def test_each_sleeper_wakes_once_though_both_roles_wait() -> None:
    states = _with(
        _pair(3.9, 5.9, _SLEEPY, have=(4, 6)), backlog_work_s=500.0, asleep=3, sleepers=3
    )
    assert sum(wakes(states, {P, D}, _NOW).values()) == 3


def test_sleepers_are_spare_capacity_of_both_roles_and_count_once() -> None:
    states = sleepers_split(_with(_pair(5.0, 15.0, have=(6, 17)), asleep=4))
    assert (states[P].facts.asleep, states[D].facts.asleep) == (1, 3)


def test_a_pool_with_roles_that_rests_boots_nothing_only_to_sleep() -> None:
    settings = ScalingSettings(0, 8, sleepers_min=1)
    idle = _pair(0.0, 0.0, settings, have=(0, 0))
    plans = plan(_with(idle, asleep=1, sleepers=1), FleetBudget(), _NOW)
    assert (plans[P].wanted, plans[D].wanted, plans[D].asleep) == (0, 0, 1)
    woken = _pair(0.1, 0.1, settings, have=(1, 1))
    for state in woken.values():
        state.slept, state.woken_at, state.demand_at = 0, _NOW - 60, _NOW
    assert plan(_with(woken, asleep=0, sleepers=0), FleetBudget(), _NOW)[D].asleep == 0
