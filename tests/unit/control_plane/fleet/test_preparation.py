"""How many replicas a rollout asks for, and what is wanted when it has ended."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.preparation import Demand, is_settled, kept_after, serving

_WANTED = st.integers(0, 10_000)
_SHARE = st.integers(0, 10_000)


def test_a_share_is_rounded_up_and_never_nobody() -> None:
    assert [serving(4, share) for share in (0, 100, 1000, 2500, 2501, 5000, 10_000)] == [
        *(1, 1, 1, 1, 2, 2, 4)
    ]
    assert serving(0, 10_000) == 1, "nothing was wanted before; a canary has to answer all the same"


@given(_WANTED, _SHARE, _SHARE)
def test_a_larger_share_never_needs_fewer(wanted: int, one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert serving(wanted, less) <= serving(wanted, more) <= max(1, wanted)


def test_who_goes_on_wants_what_was_wanted() -> None:
    assert kept_after(Demand(0, 5), Demand(4), is_shared=False) == 4
    assert kept_after(Demand(6, 5), Demand(4), is_shared=False) == 6, "operators wanted more"
    assert kept_after(Demand(6, 11), Demand(4), is_shared=True) == 10, "and others use it"


def test_a_rollout_is_settled_once() -> None:
    assert not is_settled(Demand(0, 5), Demand(4)), "it is done"
    assert is_settled(Demand(4), Demand(4, is_retiring=True))
    assert not is_settled(Demand(4), Demand(0, 2)), "it was rolled back"
    assert is_settled(Demand(4), Demand(0, 2, is_retiring=True))
    assert is_settled(Demand(4), Demand(0)), "nothing was ever asked for, or all is over"
