"""In which order workers take groups of tests: what takes longest starts first.

A worker that begins the longest group when the others are nearly done keeps everybody waiting.
Groups that are not named here take less than half a minute, and follow in the order of their names.
"""

from collections.abc import Mapping, Sequence

from tests.stacks import PAIR, REAL, SECURE, SIM, group_of

# Seconds of a group in its ring on two cores, roughly; see `tests/processor_time.py`.
SECONDS: Mapping[str, int] = {
    REAL: 600,
    PAIR: 270,
    SIM: 200,
    SECURE: 120,
    "tests/integration/test_stack.py": 200,
    "tests/integration/gateway/test_failover.py": 150,
    "tests/integration/gateway/test_processes.py": 120,
    "tests/integration/test_telemetry_service.py": 110,
    "tests/integration/gateway/test_workers.py": 80,
    "tests/integration/test_compiled_core.py": 80,
}


def longest_first(nodeids: Sequence[str]) -> list[int]:
    """Return the places of tests, those of a group together, the longest group first."""
    groups: dict[str, list[int]] = {}
    for place, nodeid in enumerate(nodeids):
        groups.setdefault(group_of(nodeid), []).append(place)
    by_length = sorted(groups, key=lambda group: -SECONDS.get(group, 0))  # stable
    return [place for group in by_length for place in groups[group]]
