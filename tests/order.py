"""In which order workers take groups of tests: what takes longest starts first.

A worker that begins the longest group when the others are nearly done keeps everybody waiting.
Groups that are not named here take less than half a minute, and follow in the order of their names.

A worker stays in a folder as long as there is work: the servers of `tests/integration` end with the
last test there. One worker begins with what needs a processor and no servers, while the others wait
for theirs. Few stacks run at once: each costs processor time while its tests wait.
"""

from collections.abc import Iterable, Mapping, Sequence

from tests.stacks import FIXTURES, PAIR, REAL, SECURE, SIM, group_of

# Seconds of a group in its ring on two cores, roughly; see `tests/processor_time.py`.
SECONDS: Mapping[str, int] = {
    REAL: 600,
    PAIR: 270,
    SIM: 330,
    SECURE: 120,
    "tests/integration/test_stack.py": 200,
    "tests/integration/gateway/test_failover.py": 150,
    "tests/integration/gateway/test_processes.py": 120,
    "tests/integration/test_telemetry_service.py": 70,
    "tests/integration/gateway/test_workers.py": 80,
    "tests/integration/gateway/test_http2_behaviour.py": 60,
    "tests/integration/test_compiled_core.py": 240,
}

_SIMULATIONS = "tests/simulation/"
STACKS_MAX = 2  # at once


def longest_first(nodeids: Sequence[str]) -> list[int]:
    """Return the places of tests, those of a group together, the longest group first."""
    groups: dict[str, list[int]] = {}
    for place, nodeid in enumerate(nodeids):
        groups.setdefault(group_of(nodeid), []).append(place)
    by_length = sorted(groups, key=lambda group: -SECONDS.get(group, 0))  # stable
    return [place for group in by_length for place in groups[group]]


def next_group(
    waiting: Iterable[str], before: str | None, *, is_last_worker: bool, stacks_elsewhere: int
) -> str:
    """Return the group that a worker takes.

    Args:
        waiting: Groups that nobody has, in their order; at least one.
        before: Group that this worker took last; None: it begins.
        is_last_worker: Whether it is the one that begins with pure work.
        stacks_elsewhere: Stacks that run for other workers.
    """
    queue = list(waiting)
    if stacks_elsewhere >= STACKS_MAX:
        queue = [group for group in queue if group not in FIXTURES] or queue
    if before is None:
        first = _SIMULATIONS if is_last_worker else ""
        return next((group for group in queue if first and group.startswith(first)), queue[0])
    folder = _folder(before)
    return next((group for group in queue if _folder(group) == folder), queue[0])


def _folder(group: str) -> str:
    """Return the folder of a group; simulations and units, which need no servers, are in one."""
    if not group.startswith("tests/"):
        return "tests/e2e"  # a stack's
    folder = "/".join(group.split("/")[:2])
    return "tests/unit" if f"{folder}/" == _SIMULATIONS else folder
