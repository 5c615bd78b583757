"""That the list of rings names real files, and that a run takes the ring it was asked for."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rings import ALL, ONE, TWO, examples_of_one, is_of, named_files, ring_of

ROOT = Path(__file__).parents[2]


def test_the_named_files_exist():
    assert [name for name in sorted(named_files()) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    ("nodeid", "ring"),
    [
        ("tests/unit/router/test_speed.py::test_x", ONE),
        ("tests/integration/test_stack.py::test_x[1]", TWO),
        ("tests/e2e/test_rollouts.py::test_x", TWO),
        ("tests/e2e/test_promises.py::test_x", ONE),
        ("tests/e2e/test_a_new_one.py::test_x", TWO),
    ],
)
def test_each_test_has_its_ring(nodeid: str, ring: str):
    assert ring_of(nodeid) == ring


def test_a_run_takes_the_files_of_its_ring():
    file = "tests/e2e/test_rollouts.py"
    assert [is_of(ring, file) for ring in (ONE, TWO, ALL)] == [False, True, True]


@pytest.mark.parametrize(("full", "few"), [(4, 4), (25, 25), (60, 25), (100, 25), (500, 125)])
def test_ring_one_looks_at_a_quarter_of_the_examples(full: int, few: int):
    assert examples_of_one(full) == few


_SEEN: list[int] = []


@settings(max_examples=400)
@given(st.integers())
def test_integers_are_whole(number: int):
    _SEEN.append(number)
    assert number == int(number)


def test_a_test_with_a_number_of_its_own_runs_the_share_of_its_ring(
    request: pytest.FixtureRequest,
):
    _SEEN.clear()
    test_integers_are_whole()
    assert len(_SEEN) == (100 if request.config.getoption("ring") == ONE else 400)
