"""Which pool a request goes to: where its session is, else where it waits and costs the least."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pool_choice import (
    COST_FACTOR,
    HOME_FACTOR,
    HOME_SLACK_MS,
    USUAL_MS,
    PoolReason,
    ServingPool,
    choose_pool,
)

_KEYS = st.integers(1, 2**64 - 1)
_POOLS = st.lists(
    st.builds(
        ServingPool,
        st.sampled_from([f"pool-{n}" for n in range(6)]),
        st.floats(0.001, 1000),
        st.floats(0.001, 1000),
    ),
    min_size=1,
    unique_by=lambda pool: pool.pool_id,
)
_WAITS = st.lists(st.none() | st.integers(0, 60_000), min_size=6, max_size=6)
KEYS = [key * 0x9E3779B97F4A7C15 % 2**64 for key in range(1, 4001)]


def _even(number: int = 3) -> list[ServingPool]:
    return [ServingPool(f"pool-{n}", 1.0, 1.0) for n in range(number)]


def _shares(pools, waits, *, session: bool = False) -> list[float]:
    chosen = Counter(
        choose_pool(pools, waits, key if session else 0, 0 if session else key)[0] for key in KEYS
    )
    return [chosen[number] / len(KEYS) for number in range(len(pools))]


@given(_POOLS, _WAITS, st.just(0) | _KEYS, _KEYS)
def test_a_pool_that_does_not_serve_is_chosen_only_if_none_does(
    pools, waits, session: int, salt: int
) -> None:
    waits = waits[: len(pools)]
    number, reason = choose_pool(pools, waits, session, salt)
    if all(wait is None for wait in waits):
        assert (number, reason) == (0, PoolReason.NONE)
    else:
        assert waits[number] is not None


@given(_POOLS, st.sets(st.integers(0, 5), min_size=1), st.just(0) | _KEYS, _KEYS)
def test_the_cheapest_pool_with_sleepers_is_chosen_if_no_pool_serves(
    pools, asleep: set[int], session: int, salt: int
) -> None:
    waits = [None] * len(pools)
    number, reason = choose_pool(pools, waits, session, salt, asleep.__contains__)
    wakeable = [it for it in range(len(pools)) if it in asleep]
    if not wakeable:
        assert (number, reason) == (0, PoolReason.NONE)
    else:
        assert reason is PoolReason.WAKE
        assert pools[number].price == min(pools[it].price for it in wakeable)
        serving = [0, *waits[1:]]
        assert choose_pool(pools, serving, session, salt, asleep.__contains__)[0] == 0


@given(_POOLS, _WAITS, st.just(0) | _KEYS, _KEYS, st.randoms(use_true_random=False))
def test_the_order_of_the_pools_decides_nothing(pools, waits, session, salt, random) -> None:
    rows = list(zip(pools, waits, strict=False))
    number, reason = choose_pool(pools, waits[: len(pools)], session, salt)
    random.shuffle(rows)
    shuffled = [pool for pool, _ in rows]
    again, why = choose_pool(shuffled, [wait for _, wait in rows], session, salt)
    assert why is reason
    if reason is not PoolReason.NONE:
        assert shuffled[again] == pools[number]


@given(_POOLS, _WAITS, _KEYS)
def test_a_request_without_a_session_never_costs_much_more_than_the_least(
    pools, waits, salt: int
) -> None:
    waits = waits[: len(pools)]
    number, reason = choose_pool(pools, waits, 0, salt)
    costs = [
        (USUAL_MS + wait) * pool.price
        for pool, wait in zip(pools, waits, strict=True)
        if wait is not None
    ]
    if costs:
        assert reason is PoolReason.WAIT
        assert (USUAL_MS + waits[number]) * pools[number].price <= COST_FACTOR * min(costs) + 1e-6


@given(_POOLS, _WAITS, _KEYS)
def test_a_session_leaves_its_home_only_if_it_would_wait_much_longer_there(
    pools, waits, session: int
) -> None:
    waits = waits[: len(pools)]
    home, _ = choose_pool(pools, [0] * len(pools), session, 1)
    number, reason = choose_pool(pools, waits, session, 2)
    there = [wait for wait in waits if wait is not None]
    if not there:
        return
    limit_ms = HOME_FACTOR * min(there) + HOME_SLACK_MS
    is_near = waits[home] is not None and waits[home] <= limit_ms
    assert (number == home) is is_near
    assert (reason is PoolReason.HOME) is is_near
    assert waits[number] <= limit_ms


@given(_KEYS, st.integers(2, 6))
def test_only_sessions_of_a_pool_that_goes_move(session: int, number: int) -> None:
    pools = _even(number)
    home = pools[choose_pool(pools, [0] * number, session, 1)[0]]
    for gone in pools:
        left = [pool for pool in pools if pool is not gone]
        moved = left[choose_pool(left, [0] * len(left), session, 1)[0]]
        assert gone is home or moved is home
        waits = [None if pool is gone else 0 for pool in pools]
        assert pools[choose_pool(pools, waits, session, 1)[0]] is moved


@pytest.mark.parametrize("session", [False, True], ids=["requests", "sessions"])
def test_weights_are_shares_while_no_pool_waits(session: bool) -> None:
    pools = [ServingPool("a", 6, 1), ServingPool("b", 3, 1), ServingPool("c", 1, 1)]
    assert _shares(pools, [0, 0, 0], session=session) == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_a_pool_that_waits_gets_fewer_and_then_none() -> None:
    shares = [_shares(_even(2), [0, wait])[1] for wait in (0, 60, 125, 240, 260)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.5, abs=0.03)
    assert 0.15 < shares[3] < 0.3
    assert shares[4] == 0


def test_an_expensive_pool_takes_requests_that_would_wait_elsewhere() -> None:
    pools = [ServingPool("own", 1, 1), ServingPool("rented", 1, 5)]
    assert _shares(pools, [0, 0]) == [1, 0]
    assert _shares(pools, [300, 0])[1] == 0, "a wait of 0.3 s is worth less than five times"
    assert 0.4 < _shares(pools, [1000, 0])[1] < 0.6
    assert _shares(pools, [4000, 0]) == [0, 1]
    assert _shares(pools, [None, 0]) == [0, 1]
