"""Sets as integers do what sets of numbers do."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.distribution.bits import every, first_from, members, starts_of_runs

NUMBERS = st.sets(st.integers(0, 200))


def mask_of(numbers: set[int]) -> int:
    return sum(1 << number for number in numbers)


@given(NUMBERS)
def test_members_equal_the_added_numbers(numbers: set[int]):
    assert list(members(mask_of(numbers))) == sorted(numbers)


@given(NUMBERS.filter(bool), st.integers(0, 300))
def test_the_first_from_an_offset_wraps(numbers: set[int], offset: int):
    above = [number for number in numbers if number >= offset]
    assert first_from(mask_of(numbers), offset) == min(above or numbers)


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_so_many(step: int, count: int):
    assert list(members(every(step, count))) == [step * i for i in range(count)]


@given(NUMBERS, st.integers(1, 9))
def test_runs(numbers: set[int], length: int):
    runs = {n for n in numbers if all(n + i in numbers for i in range(length))}
    assert set(members(starts_of_runs(mask_of(numbers), length))) == runs
