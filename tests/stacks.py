"""Which end-to-end tests share a running stack, and so belong on one worker.

A stack takes a dozen seconds of processor time to start and a tenth of a core while nobody asks it
anything: it runs once, and only while its tests do.
"""

from collections.abc import Iterable

REAL, PAIR, SIM, SECURE = "real_stack", "pair", "stack", "secure_stack"
FIXTURES = (REAL, PAIR, SIM, SECURE)
_FILES = {
    "tests/e2e/test_console.py": SIM,
    "tests/e2e/test_faults_under_load.py": PAIR,
    "tests/e2e/test_auto.py": SIM,
    "tests/e2e/test_budgets.py": SIM,
    "tests/e2e/test_burst.py": SIM,
    "tests/e2e/test_ledger_faults.py": SIM,
    "tests/e2e/test_mutual_tls.py": SECURE,
    "tests/e2e/test_openai_sdk.py": SIM,
    "tests/e2e/test_pool_moves.py": SIM,
    "tests/e2e/test_promises.py": SIM,
    "tests/e2e/test_scaling.py": SIM,
    "tests/e2e/test_sockets.py": SIM,
}


def file_of(nodeid: str) -> str:
    """Return the path of a test's file."""
    return nodeid.split("::", 1)[0]


def group_of(nodeid: str) -> str:
    """Return what runs on one worker: a stack's tests, or a file's."""
    file = file_of(nodeid)
    if not file.startswith("tests/e2e/"):
        return file
    return _FILES.get(file, REAL)


def misplaced(nodeid: str, fixtures: Iterable[str]) -> str:
    """Say which other stack a test of this group uses; empty: none."""
    others = [name for name in FIXTURES if name in fixtures and name != group_of(nodeid)]
    return f"{nodeid} uses {', '.join(others)}: see tests/stacks.py" if others else ""
