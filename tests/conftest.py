"""Shared by all tests."""

import os

import pytest

# Test fixtures start servers as another user, for which Python forks. gRPC's fork handlers may
# abort such a child before it becomes the server; without them nothing of gRPC runs in it.
# Has to be set before gRPC is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from sluice import process
from tests.ports import free_port

# Before anybody imports it by name.
process.free_port = free_port

# Tests of these need what takes long to start, and are so many: one worker runs all of each.
_STACKS = ("real_stack", "stack")
# What waits for servers begins, and what computes, in many small files, fills the rest evenly.
_DIRECTORIES = ("e2e", "integration", "contract", "simulation", "unit")


def _rank(item: pytest.Item) -> tuple[int, int]:
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    stacks = [name for name in _STACKS if name in item.fixturenames]
    return _DIRECTORIES.index(folder), _STACKS.index(stacks[0]) if stacks else len(_STACKS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order all tests, and say which of them one worker of `--dist=loadgroup` takes together."""
    items.sort(key=_rank)
    for item in items:
        _, stack = _rank(item)
        group = _STACKS[stack] if stack < len(_STACKS) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
