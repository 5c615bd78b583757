"""How many replicas a rollout asks for, and what is wanted when it has ended."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.model import REPLICAS_MAX
from control_plane.fleet.preparation import (
    PoolDemand,
    is_settled,
    replicas_after,
    serving,
    together,
)

_WANTED = st.integers(0, 10_000)
_SHARE = st.integers(0, 10_000)


def test_a_share_is_rounded_up_and_never_zero() -> None:
    assert [serving(4, share) for share in (0, 100, 1000, 2500, 2501, 5000, 10_000)] == [
        *(1, 1, 1, 1, 2, 2, 4)
    ]
    assert serving(0, 10_000) == 1, "nothing was wanted before; a canary has to answer all the same"


@given(_WANTED, _SHARE, _SHARE)
def test_a_larger_share_never_needs_fewer(wanted: int, one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert serving(wanted, less) <= serving(wanted, more) <= max(1, wanted)


@given(_WANTED, st.lists(_WANTED, min_size=1))
def test_rollouts_into_one_pool_take_nothing_from_each_other(steady: int, asked: list[int]) -> None:
    found = together(steady, asked)
    assert found is not None
    assert found == min(REPLICAS_MAX, steady + sum(asked))
    assert together(steady, [*asked, 2]) == min(REPLICAS_MAX, found + 2)


def test_no_rollout_asks_for_nothing() -> None:
    assert together(4, []) is None


def test_a_continuing_rollout_keeps_its_demand() -> None:
    assert replicas_after(PoolDemand(0, 5), PoolDemand(4)) == 4
    assert replicas_after(PoolDemand(6, 5), PoolDemand(4)) == 6, "operators wanted more"
    assert replicas_after(PoolDemand(0, 2), PoolDemand(0)) == 1, "its last stage needed one"


@given(_WANTED, _WANTED, st.integers(1, 20))
def test_going_to_and_fro_lets_no_pool_grow(one: int, other: int, moves: int) -> None:
    largest = max(1, one, other)
    for _ in range(moves):
        one, other = replicas_after(PoolDemand(other, 1), PoolDemand(one)), one
    assert max(one, other) <= largest


def test_a_rollout_is_settled_once() -> None:
    assert not is_settled(PoolDemand(0, 5), PoolDemand(4)), "it is done"
    assert is_settled(PoolDemand(4), PoolDemand(4)), "and has been put away"
    assert not is_settled(PoolDemand(4), PoolDemand(0, 2)), "it was rolled back"
    assert is_settled(PoolDemand(4), PoolDemand(0, 2, is_ending=True))
    assert is_settled(PoolDemand(4), PoolDemand(0)), "nothing was ever asked for, or all is over"
