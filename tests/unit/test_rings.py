"""That the list of rings names real files, and that a run takes the ring it was asked for."""

from pathlib import Path

import pytest

from tests.rings import ALL, ONE, TWO, is_of, named_files, ring_of

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
