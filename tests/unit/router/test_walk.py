"""How often a request comes back to a floor of the router core while it is submitted."""

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from router.core import router as core_module

CORE = Path(core_module.__file__).parent
RETURNS_MAX = 8  # router/README.md shows the longest walk
TICK_RETURNS_MAX = 35  # of the tick that dispatches one request of a cell with one replica
PRICED = ("router", "lifecycle", "cell", "fleet", "queue", "cell_admission", "decide")
PREDICTED = (*PRICED, "cell", "decide", "cell", "queue", "decide")
QUEUED = ("lifecycle", "cell", "queue", "cell_news")
REFUSED = ("cell", "decide", "queue", "cell_news", "tier_gates")


def floors_entered(action: Any) -> list[str]:
    """Run an action; return the floors whose functions are called, in order, neighbours merged.

    A floor is a file of `router/core`, or a folder with all its files: a call from one file of
    `queue` to another is no change of floors. Only calls of functions count; a return to the
    caller, a read attribute and a comprehension do not. The types are none: every floor reads them.
    """
    entered: list[str] = []

    def note(frame: Any, event: Any, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CORE):
            entered.append(path.relative_to(CORE).parts[0].removesuffix(".py"))

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return [floor for floor, _ in groupby(floor for floor in entered if floor != "types")]


@pytest.mark.parametrize(
    ("waiting", "deadline_s", "walk"),
    [
        pytest.param(0, 30.0, [*PRICED, *QUEUED], id="with nothing before it"),
        pytest.param(20, 1e6, [*PRICED, "cell", "decide", *QUEUED], id="in time for sure"),
        pytest.param(20, 1e-3, [*PREDICTED, *REFUSED], id="refused"),
        pytest.param(2, 1e6, [*PREDICTED, *QUEUED], id="predicted"),
    ],
)
def test_a_request_that_is_submitted_comes_back_to_few_floors(
    bench: Any, waiting: Any, deadline_s: Any, walk: Any
):
    world = bench(replicas=1, sequences=1, deadline_default_s=1e6)
    world.submit()
    for _ in range(waiting):
        world.submit(tenant_id="other")
    floors = floors_entered(lambda: world.submit(tick=False, deadline_s=deadline_s))
    assert floors == walk
    assert len(floors) - len(set(floors)) <= RETURNS_MAX


def test_a_request_for_a_cold_adapter_comes_back_to_no_more_floors(bench: Any):
    world = bench(replicas=1, sequences=1, adapter_slots=4, deadline_default_s=1e6)
    world.submit()
    for _ in range(2):
        world.submit(tenant_id="other")
    floors = floors_entered(lambda: world.submit(tick=False, deadline_s=1e6, adapter="cold"))
    assert floors[-4:] == list(QUEUED), "it was admitted"
    assert len(floors) - len(set(floors)) <= RETURNS_MAX


def test_the_tick_that_dispatches_a_request_comes_back_to_few_floors(bench: Any):
    world = bench(replicas=1)
    world.submit(tick=False)
    floors = floors_entered(lambda: world.core.tick(world.now))
    assert "dispatch" in floors
    assert next(iter(world.core.replicas.values())).dispatches, "it was dispatched"
    assert len(floors) - len(set(floors)) <= TICK_RETURNS_MAX
