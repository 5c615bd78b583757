"""Rules of `plan`: bounds, pins, spare, backlog, budget, idle pools; drills of peers' complaints."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scaling.backlog import owed_work_s, under_way
from control_plane.scaling.demand import BUCKET_S, DemandHistory
from control_plane.scaling.model import (
    Cause,
    FleetBudget,
    PoolFacts,
    PoolPlan,
    PoolState,
    ScalingSettings,
)
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.sleeping import urgent, wakes

HOLD_S = ScalingSettings().hold_s

_OPEN = FleetBudget()


def _state(settings: ScalingSettings, demand: float, minutes: float = 60.0) -> PoolState:
    state = PoolState(settings, PoolFacts(ready=1, booting=0, backlog_work_s=0.0))
    for _ in range(int(minutes * 60 / BUCKET_S)):
        state.history.add(demand)
    return state


def _plan(state: PoolState, now: float, budget: FleetBudget = _OPEN) -> PoolPlan:
    decided = plan({"pool": state}, budget, now)["pool"]
    remember(state, decided, now)
    return decided


def _settings(least: int = 1, most: int = 400, **others: float) -> ScalingSettings:
    return ScalingSettings(replicas_min=least, replicas_max=most, minute_worth=0.0, **others)  # pyright: ignore[reportArgumentType]


def test_constant_demand_gets_its_work_and_its_noise_and_stays() -> None:
    state = _state(_settings(), 10.0)
    asked: set[int] = set()
    for at in range(40):
        state.history.add(10.0)
        state.facts = PoolFacts(max(asked, default=10), 0, 0.0)
        asked.add(_plan(state, 1000.0 + BUCKET_S * at).wanted)
    assert len(asked) == 1
    assert 11 <= asked.pop() <= 14


def test_the_replica_that_stays_is_asked_to_take_over_the_load_of_the_one_that_goes() -> None:
    """ai-dynamo/dynamo#9294: 2 <-> 1 at constant load."""
    state = _state(_settings(), 1.3)
    state.facts = PoolFacts(2, 0, 0.0)
    for at in range(80):
        state.history.add(1.3)
        assert _plan(state, 1000.0 + BUCKET_S * at).wanted == 2


def test_the_hold_begins_with_the_fall_and_not_when_the_base_has_followed_it() -> None:
    state = _state(_settings(), 20.0)
    state.facts = PoolFacts(24, 0, 0.0)
    for _ in range(40):
        state.history.add(20.0)
        state.facts = replace(state.facts, ready=_plan(state, 1000.0).wanted)
    began = state.facts.ready
    kept_s = 0.0
    while state.facts.ready == began:
        kept_s += BUCKET_S
        state.history.add(5.0)
        state.facts = replace(state.facts, ready=_plan(state, 1000.0 + kept_s).wanted)
        assert kept_s <= HOLD_S + 2 * BUCKET_S
    assert kept_s >= HOLD_S - BUCKET_S
    assert state.facts.ready < began / 2


def test_a_queue_asks_for_replicas_even_where_first_tokens_look_fine() -> None:
    """ai-dynamo/dynamo#10528: a planner that cannot see queue time."""
    state = _state(_settings(), 4.0)
    state.facts = PoolFacts(5, 0, backlog_work_s=600.0)
    decided = _plan(state, 1000.0)
    assert decided.wanted >= 4 + 600 / 30
    assert Cause.BACKLOG in {reason.cause for reason in decided.reasons}


def test_an_objective_that_one_request_misses_is_a_warning_and_no_floor() -> None:
    """ai-dynamo/dynamo#11624."""
    state = _state(_settings(), 2.0)
    state.facts = PoolFacts(3, 0, 0.0, objective_s=0.5, single_s=0.9)
    decided = _plan(state, 1000.0)
    assert decided.wanted <= 3
    assert "0.90 s" in decided.warnings[0]
    assert "0.50 s" in decided.warnings[0]


def test_replicas_that_find_no_place_are_told_and_neither_block_others_nor_going_down() -> None:
    """ai-dynamo/dynamo#14251: no accelerator to be had."""
    settings = _settings(accelerators=1)
    stuck, other = _state(settings, 20.0), _state(settings, 5.0)
    stuck.facts = PoolFacts(2, 20, 0.0, unplaced=20, unplaced_s=3600.0)
    other.facts = PoolFacts(4, 0, 0.0)
    plans = plan({"stuck": stuck, "other": other}, FleetBudget(accelerators=10), 1000.0)
    assert plans["other"].wanted == plan({"other": other}, _OPEN, 1000.0)["other"].wanted
    assert "no place" in plans["stuck"].warnings[0]
    for at in range(int(HOLD_S / BUCKET_S) + 50):
        stuck.history.add(1.0)
        decided = _plan(stuck, 1000.0 + BUCKET_S * at)
    assert decided.wanted < 5  # pyright: ignore[reportPossiblyUnboundVariable]


def test_a_number_set_by_hand_stands_until_its_time_is_over() -> None:
    """ai-dynamo/dynamo#4420."""
    state = _state(_settings(), 10.0)
    state.facts = PoolFacts(12, 0, 0.0)
    state.settings = replace(state.settings, pin=3, pin_until=2000.0)
    assert _plan(state, 1999.0).wanted == 3
    assert _plan(state, 1999.0).reasons[-1].cause is Cause.PIN
    assert _plan(state, 2000.0).wanted > 3


def test_a_paused_pool_stays_as_it_is() -> None:
    state = _state(_settings(), 10.0)
    state.settings = replace(state.settings, is_paused=True)
    state.facts = PoolFacts(4, 1, 100.0)
    assert _plan(state, 1000.0).wanted == 5


def test_down_goes_a_pool_only_when_nothing_has_asked_for_the_replica_for_the_hold() -> None:
    state = _state(_settings(), 20.0)
    before = _plan(state, 1000.0).wanted
    state.facts = PoolFacts(before, 0, 0.0)
    first_down = None
    for at in range(1, 120):
        state.history.add(5.0)
        decided = _plan(state, 1000.0 + BUCKET_S * at)
        if decided.wanted < before and first_down is None:
            first_down = BUCKET_S * at
    assert first_down is not None
    assert first_down >= HOLD_S


def test_a_replica_is_held_no_longer_than_it_boots() -> None:
    """A replica that is needed again costs one boot, so a long hold of quick boots is idle time."""
    state = _state(_settings(), 10.0)
    state.boots_s.extend([100.0] * 8)
    high = _plan(state, 1000.0).wanted
    state.facts = PoolFacts(high, 0, 0.0)
    for _ in range(40):
        state.history.add(4.0)
    assert _plan(state, 1000.0 + 99.0).wanted == high
    assert _plan(state, 1000.0 + 101.0).wanted < high
    assert HOLD_S > 101.0


def test_boots_under_way_are_not_requested_again() -> None:
    """A queue grows until the first boot ends, but the replicas for it were requested before."""
    state = _state(_settings(), 10.0)
    state.facts = PoolFacts(12, 0, 100.0)
    for demand in (14.0, 18.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0):
        state.history.add(demand)
    first = _plan(state, 1000.0).wanted
    state.facts = PoolFacts(12, first - 12, 100.0 + 8.0 * 150)
    assert _plan(state, 1150.0).wanted <= first
    state.boots.clear()  # as if the boots had only just begun
    assert _plan(state, 1150.0).wanted > first + 8.0 * 100 / 30


def test_boots_that_are_late_are_not_relied_on() -> None:
    state = _state(_settings(), 10.0)
    state.facts = PoolFacts(5, 20, 100.0)
    state.boots.append((1000.0, 20))
    soon, late = (owed_work_s(state, 10.0, 200.0, at) for at in (1170.0, 1301.0))
    assert soon < 300.0
    assert late == 100.0 + 5.0 * 200.0


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 20)), max_size=6),
    st.integers(0, 40),
    st.integers(0, 40),
    st.floats(0, 100),
    st.floats(0, 1e4),
)
def test_work_that_will_wait_is_between_the_queue_and_a_wait_without_boots(
    boots: list[tuple[float, int]], booting: int, ready: int, demand: float, backlog: float
) -> None:
    state = _state(_settings(), 1.0, minutes=1)
    state.facts = PoolFacts(ready, booting, backlog)
    state.boots.extend(sorted(boots))
    owed = owed_work_s(state, demand, 200.0, 1000.0)
    assert sum(count for _, count in under_way(state, 1000.0)) == booting
    assert backlog <= owed <= (backlog + max(0.0, demand - ready) * 200.0) * (1 + 1e-9)


def test_requested_boots_are_recorded_and_cancelled_ones_are_forgotten() -> None:
    state = _state(_settings(), 10.0)
    state.facts = PoolFacts(4, 0, 0.0)
    more = _plan(state, 1000.0).wanted - 4
    assert state.boots == [(1000.0, more)]
    state.facts = PoolFacts(6, more - 2, 0.0)
    _plan(state, 1200.0)
    assert state.boots == [(1000.0, more - 2)]
    state.history = DemandHistory()
    state.asks.clear()
    _plan(state, 1215.0)
    assert state.boots == []


def test_a_number_that_has_been_unknown_for_long_is_not_reduced() -> None:
    state = PoolState(_settings(), PoolFacts(10, 0, 0.0), known_since=1000.0)
    state.history.add(0.1)
    assert _plan(state, 1015.0).wanted == 10


def test_an_idle_pool_goes_to_none_and_comes_back_with_the_first_work() -> None:
    state = _state(_settings(0, 8, idle_s=600.0), 0.0)
    state.facts = PoolFacts(1, 0, 0.0)
    assert _plan(state, 599.0).wanted == 1
    assert _plan(state, 601.0).wanted == 0
    state.facts = PoolFacts(0, 0, backlog_work_s=0.5)
    assert _plan(state, 602.0).wanted >= 1


def test_spare_is_bought_where_it_is_cheap() -> None:
    def spare(demand: float) -> float:
        state = _state(ScalingSettings(1, 400, minute_worth=3.0), demand)
        return _plan(state, 1000.0).ask / demand

    assert spare(8.0) > 2.0
    assert spare(60.0) < 1.5


def test_a_surge_asks_for_more_than_it_has_reached() -> None:
    state = _state(_settings(), 10.0)
    state.facts = PoolFacts(12, 0, 0.0)
    for demand in (14.0, 19.0):
        state.history.add(demand)
    decided = _plan(state, 1000.0)
    assert decided.reasons[0].cause is Cause.SURGE
    assert decided.wanted > 19


def test_a_minimum_over_the_budget_is_cut_and_told() -> None:
    state = _state(_settings(10, 20, accelerators=8), 1.0)
    decided = _plan(state, 1000.0, FleetBudget(accelerators=32))
    assert decided.wanted == 4
    assert decided.reasons[-1].cause is Cause.BUDGET
    assert "raise it" in decided.warnings[-1]


_POOLS = st.lists(
    st.tuples(
        st.integers(0, 5),  # minimum
        st.integers(1, 40),  # maximum
        st.integers(0, 8),  # accelerators
        st.floats(0, 10),  # price
        st.floats(0, 50),  # demand
        st.integers(0, 20),  # ready
        st.integers(0, 5),  # booting
        st.floats(0, 1e4),  # backlog
    ),
    min_size=1,
    max_size=6,
)


@given(_POOLS, st.integers(0, 400), st.floats(0, 1000))
def test_no_plan_exceeds_the_budget_or_stops_serving_replicas_for_it(
    rows: list[tuple[int, int, int, float, float, int, int, float]],
    accelerators: int,
    price: float,
) -> None:
    """ai-dynamo/dynamo#12428: over all pools and roles together."""
    pools: dict[str, PoolState] = {}
    for number, row in enumerate(rows):
        settings = ScalingSettings(row[0], row[1], accelerators=row[2], price=row[3])
        pools[str(number)] = _state(settings, row[4], minutes=2)
        pools[str(number)].facts = PoolFacts(row[5], row[6], row[7])
    free = plan(pools, _OPEN, 1e6)
    bound = plan(pools, FleetBudget(accelerators, price), 1e6)
    held = {key: min(state.facts.ready, free[key].wanted) for key, state in pools.items()}

    def of(counts: dict[str, int]) -> tuple[float, float]:
        return (
            sum(pools[key].settings.accelerators * n for key, n in counts.items()),
            sum(pools[key].settings.price * n for key, n in counts.items()),
        )

    used, least = of({key: decided.wanted for key, decided in bound.items()}), of(held)
    assert used[0] <= max(accelerators, least[0])
    assert used[1] <= max(price, least[1]) * (1 + 1e-9)
    for key, decided in bound.items():
        assert held[key] <= decided.wanted <= free[key].wanted


@pytest.mark.parametrize("pools", [200])
def test_plan_is_one_pass_over_many_pools(pools: int) -> None:
    states = {str(number): _state(_settings(accelerators=1), 20.0) for number in range(pools)}
    plans = plan(states, FleetBudget(accelerators=1000), 1000.0)
    assert sum(decided.wanted for decided in plans.values()) == 1000
    assert max(d.wanted for d in plans.values()) - min(d.wanted for d in plans.values()) <= 1


def _sleeping(**facts: float) -> PoolFacts:
    return PoolFacts(ready=10, booting=0, backlog_work_s=0.0, **facts)  # pyright: ignore[reportArgumentType]


def test_a_calm_pool_keeps_its_share_of_the_busiest_time_asleep() -> None:
    state = _state(_settings(sleepers_share=0.1), 20.0)
    state.facts = PoolFacts(21, 0, 0.0)
    decided = _plan(state, 1000.0)
    assert decided.asleep == 2
    assert decided.wanted >= 20


def test_a_pool_in_need_boots_no_replica_in_order_to_sleep() -> None:
    state = _state(_settings(sleepers_share=0.5), 10.0)
    state.facts = _sleeping(asleep=2)
    state.facts = replace(state.facts, backlog_work_s=400.0)
    decided = _plan(state, 1000.0)
    assert decided.wanted > 12
    assert decided.asleep == 0


def test_a_sleeper_serves_before_another_replica_boots() -> None:
    state = _state(_settings(sleepers_min=1), 10.0)
    state.facts = _sleeping(asleep=1, sleepers=1, planned=10)
    decided = _plan(state, 1000.0)
    assert (decided.wanted > 10, decided.asleep) == (True, 0)


def test_another_sleeper_boots_once_the_woken_one_has_served_for_longer_than_a_surge() -> None:
    state = _state(_settings(sleepers_min=1), 10.0)
    state.note_sleepers(1, 1000.0)
    state.note_sleepers(0, 1015.0)
    state.facts = PoolFacts(11, 0, 0.0, planned=11, sleepers=0)
    for served_s, asleep in ((HOLD_S, 0), (2 * HOLD_S, 0), (2 * HOLD_S + 1.0, 1)):
        state.demand_at = 1015.0 + served_s
        assert _plan(state, state.demand_at).asleep == asleep


def test_a_replica_that_demand_no_longer_needs_becomes_the_sleeper() -> None:
    state = _state(_settings(sleepers_min=1), 2.0)
    state.note_sleepers(1, 900.0)
    state.note_sleepers(0, 915.0)
    state.facts = PoolFacts(5, 0, 0.0, planned=5, sleepers=0)
    state.asks, state.demand_at = [(990.0, 5.0)], 1000.0
    decided = _plan(state, 1000.0)
    assert (decided.reasons[-1].cause, decided.wanted, decided.asleep) == (Cause.HOLD, 5, 0)
    state.asks = []
    decided = _plan(state, 1001.0)
    assert (decided.wanted, decided.asleep) == (3, 1)


def test_the_only_replica_of_a_pool_that_may_sleep_is_its_own_sleeper() -> None:
    idle_s = 900.0
    state = _state(_settings(least=0, sleepers_min=1, idle_s=idle_s), 0.0)
    state.facts = PoolFacts(1, 0, 0.0, planned=1, sleepers=0)
    state.note_sleepers(1, 9000.0)
    state.note_sleepers(0, 9015.0)
    state.demand_at = 9015.0
    idle = [_plan(state, at) for at in (9015.0, 9015.0 + idle_s - 1.0, 9015.0 + idle_s)]
    assert [(it.wanted, it.asleep) for it in idle] == [(1, 0), (1, 0), (0, 1)]
    state.history.add(0.5)
    assert _plan(state, 9016.0).asleep == 0
    assert _plan(state, 9100.0 + idle_s).asleep == 1, "requests have come for long enough"


def test_sleepers_come_last_in_a_budget() -> None:
    settings = replace(_settings(sleepers_min=3), accelerators=1)
    state = _state(settings, 10.0)
    state.facts = _sleeping()
    wanted = _plan(state, 1000.0).wanted
    assert _plan(state, 1000.0, FleetBudget(accelerators=wanted + 2)).asleep == 2
    tight = _plan(state, 1000.0, FleetBudget(accelerators=wanted - 1))
    assert (tight.wanted, tight.asleep) == (wanted - 1, 0)


def test_work_that_may_wait_asks_for_no_noise_and_no_spare_until_it_has_waited() -> None:
    state = _state(_settings(), 20.0)
    state.facts = _sleeping()
    whole = _plan(state, 1000.0).wanted
    state.facts = _sleeping(deferrable_share=0.3, deferrable_s=900.0)
    part = _plan(state, 1000.0).wanted
    assert 20 <= part < whole
    state.facts = replace(state.facts, deferred_work_s=4500.0)
    assert _plan(state, 1000.0).wanted >= 20 * 0.7 + 4500 / 450


@pytest.mark.parametrize(
    ("changes", "woken"),
    [
        ({}, 2),
        ({"asleep": 0}, 0),
        ({"backlog_work_s": 1.0}, 0),
        ({"ready": 0, "backlog_work_s": 0.5}, 2),
    ],
)
def test_sleepers_wake_between_two_looks_when_work_waits(
    changes: dict[str, float], woken: int
) -> None:
    state = _state(_settings(), 4.0)
    state.facts = replace(PoolFacts(4, 0, 300.0, asleep=2), **changes)  # pyright: ignore[reportArgumentType]
    assert urgent(state, 1000.0) == woken


def test_nothing_wakes_by_itself_where_an_operator_decides() -> None:
    state = _state(_settings(), 4.0)
    state.facts = PoolFacts(4, 0, 300.0, asleep=2)
    for settings in (replace(state.settings, is_paused=True), replace(state.settings, pin=4)):
        state.settings = settings
        assert urgent(state, 1000.0) == 0


def test_a_sleeper_that_wakes_for_a_queue_is_kept_until_the_queue_is_empty() -> None:
    state = _state(_settings(), 0.5)
    state.known_since = -10_000.0
    state.facts = PoolFacts(1, 0, 3.0, asleep=1)
    assert urgent(state, 1000.0) == 1
    state.facts = PoolFacts(1, 1, 3.0, planned=2, waking=1)
    assert _plan(state, 1001.0).wanted == 2, "it does not serve yet"
    state.facts = PoolFacts(2, 0, 3.0, planned=2)
    assert _plan(state, 1003.0).wanted == 2
    state.facts = PoolFacts(2, 0, 0.0, planned=2)
    assert _plan(state, 1005.0).wanted == 1


def _sharing(own: PoolFacts, **others: tuple[PoolFacts, float]) -> dict[str, PoolState]:
    pools = {"own": _state(_settings(most=6), 4.0)}
    pools["own"].facts = own
    pools["own"].others = tuple((key, ratio) for key, (_, ratio) in others.items())
    for key, (facts, _) in others.items():
        pools[key] = _state(_settings(0, 6), 0.0)
        pools[key].facts = facts
    return pools


def test_a_queue_wakes_sleepers_of_other_pools_of_its_model() -> None:
    asleep = PoolFacts(0, 0, 0.0, asleep=2)
    pools = _sharing(PoolFacts(4, 0, 50.0), far=(asleep, 1.0))
    assert wakes(pools, {"own"}, 1000.0) == {"far": 2}
    pools["own"].facts = PoolFacts(4, 0, 50.0, asleep=1)
    assert wakes(pools, {"own"}, 1000.0) == {"own": 1, "far": 2}
    assert wakes(pools, set(), 1000.0) == {}
    pools["own"].facts = PoolFacts(4, 0, 1.0, asleep=1)
    assert wakes(pools, {"own"}, 1000.0) == {}, "no queue"
    pools["own"].facts = PoolFacts(0, 0, 1.0)
    assert wakes(pools, {"own"}, 1000.0) == {"far": 2}, "one request that nobody serves"


def test_the_cheapest_pool_wakes_first_and_work_counts_in_its_own_replicas() -> None:
    asleep = PoolFacts(0, 0, 0.0, asleep=9)
    pools = _sharing(PoolFacts(4, 0, 50.0), fast=(asleep, 0.5), slow=(asleep, 2.0))
    assert wakes(pools, {"own"}, 1000.0) == {"fast": 2}
    pools["fast"].facts = replace(asleep, asleep=1)
    assert wakes(pools, {"own"}, 1000.0) == {"fast": 1, "slow": 2}
    pools["fast"].settings = replace(pools["fast"].settings, is_paused=True)
    assert wakes(pools, {"own"}, 1000.0) == {"slow": 6}


def test_a_sleeper_that_woke_for_another_pool_serves_for_the_hold() -> None:
    pools = _sharing(PoolFacts(4, 0, 0.0), far=(PoolFacts(1, 0, 0.0, planned=1), 1.0))
    far = pools["far"]
    far.others = (("own", 1.0),)
    far.note_sleepers(1, 900.0)
    far.note_sleepers(0, 1000.0)
    far.known_since = far.demand_at = -10_000.0
    assert plan(pools, _OPEN, 1000.0)["far"].wanted == 1
    assert plan(pools, _OPEN, 1000.0 + HOLD_S)["far"].wanted == 0
