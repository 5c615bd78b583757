"""That the longest groups of tests start first, and stay together."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.order import SECONDS, STACKS_MAX, longest_first, next_group
from tests.stacks import FIXTURES, REAL, SIM, group_of

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


QUEUE = (
    "tests/integration/test_stack.py",
    SIM,
    "tests/contract/test_a.py",
    "tests/integration/gateway/test_b.py",
    "tests/simulation/test_c.py",
    "tests/unit/router/test_d.py",
)


@pytest.mark.parametrize(
    ("before", "is_last_worker", "wanted"),
    [
        (None, False, QUEUE[0]),
        (None, True, "tests/simulation/test_c.py"),
        ("tests/integration/gateway/test_x.py", False, QUEUE[0]),
        ("tests/contract/test_x.py", True, "tests/contract/test_a.py"),
        ("tests/unit/sluice/test_x.py", True, "tests/simulation/test_c.py"),
        (REAL, False, SIM),
        ("tests/elsewhere/test_x.py", False, QUEUE[0]),
    ],
)
def test_a_worker_stays_in_its_folder(
    before: str | None, is_last_worker: bool, wanted: str
) -> None:
    found = next_group(QUEUE, before, is_last_worker=is_last_worker, stacks_elsewhere=0)
    assert found == wanted


def test_a_ring_without_simulations_begins_with_the_longest():
    without = [group for group in QUEUE if "simulation" not in group]
    assert next_group(without, None, is_last_worker=True, stacks_elsewhere=0) == QUEUE[0]
    after_simulations = next_group(
        without, "tests/simulation/test_x.py", is_last_worker=True, stacks_elsewhere=0
    )
    assert after_simulations == without[-1]


def test_a_stack_waits_while_enough_others_run():
    def after_a_stack(queue: Sequence[str], elsewhere: int) -> str:
        return next_group(queue, REAL, is_last_worker=False, stacks_elsewhere=elsewhere)

    assert after_a_stack(QUEUE, STACKS_MAX - 1) == SIM
    assert after_a_stack(QUEUE, STACKS_MAX) == QUEUE[0]
    assert after_a_stack([SIM], STACKS_MAX) == SIM, "a stack is all that is left"
