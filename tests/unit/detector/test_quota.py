"""At most a third is out, whoever takes it out."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.detector.quota import room


@given(total=st.integers(0, 10_000), out=st.integers(0, 10_000))
def test_room_ends_at_a_third(total, out) -> None:
    left = room(total, out)
    assert 3 * (out + left) <= total < 3 * (out + left + 1)


def test_one_or_two_are_left_alone() -> None:
    assert [room(total, 0) for total in (0, 1, 2, 3)] == [0, 0, 0, 1]
