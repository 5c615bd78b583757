"""That the longest groups of tests start first, and stay together."""

from pathlib import Path

from tests.order import SECONDS, longest_first
from tests.stacks import FIXTURES, REAL, group_of

ROOT = Path(__file__).parents[2]


def test_the_named_groups_exist():
    files = [name for name in SECONDS if name not in FIXTURES]
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert [name for name in files if group_of(name) != name] == []


def test_the_longest_group_is_first_and_others_keep_their_order():
    long = next(name for name in SECONDS if name not in FIXTURES)
    nodeids = [
        "tests/contract/test_a.py::test_1",
        "tests/e2e/test_tutorial.py::test_1",
        "tests/integration/test_b.py::test_1",
        f"{long}::test_1",
        "tests/contract/test_a.py::test_2",
        f"{long}::test_2",
        "tests/e2e/test_rollouts.py::test_1",
    ]
    assert group_of(nodeids[1]) == group_of(nodeids[6]) == REAL
    assert longest_first(nodeids) == [1, 6, 3, 5, 0, 4, 2]
