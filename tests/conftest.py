"""Shared by all tests."""

import gc
import os
import ssl
import sys
from functools import cache
from pathlib import Path
from typing import Any

# Test fixtures start servers as another user, for which Python forks. gRPC's fork handlers may
# abort such a child before it becomes the server; without them nothing of gRPC runs in it.
# Has to be set before gRPC is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# All processes of a test are of one installation.
os.environ.setdefault("INSTALLATION__SECRET", "of-the-tests-" + "0123456789abcdef" * 2)
# Tables are as wide as COLUMNS says, which pytest sets for its own lines.
os.environ.pop("COLUMNS", None)

import httpx
import pytest
import structlog
from httpx._transports import default as transports
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from sluice import process, shared_secret
from tests.order import longest_first, next_group
from tests.ports import free_port
from tests.rings import ALL, EXAMPLES_OF_ONE, ONE, RINGS, examples_of_one, is_of
from tests.stacks import FIXTURES, group_of, misplaced

# What a command prints is read from stdout; logs of servers in the same process stay out of it.
structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))

# Collecting tests makes millions of objects that stay: see `pytest_collection_finish`.
gc.disable()

# Before anybody imports it by name.
process.free_port = free_port
shared_secret.use()


# Each new client of HTTPX reads all authorities, which takes 30 ms; tests make thousands, and ask
# nobody whom these vouch for.
@cache
def _authorities(trust_env: bool, _files: tuple[str | None, ...]) -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=trust_env)


def _ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is True and cert is None:
        named = ("SSL_CERT_FILE", "SSL_CERT_DIR") if trust_env else ()
        return _authorities(trust_env, tuple(map(os.environ.get, named)))
    return httpx.create_ssl_context(verify, cert, trust_env)


setattr(transports, "create_ssl_context", _ssl_context)  # noqa: B010 - not exported

# A machine that stalls is no reason to fail.
settings.register_profile("sluice", deadline=None)
settings.register_profile("ring-one", deadline=None, max_examples=EXAMPLES_OF_ONE)
settings.load_profile("sluice")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of a ring."""
    parser.addoption("--ring", choices=RINGS, default=ALL, help="see tests/rings.py")


def pytest_configure(config: pytest.Config) -> None:
    """Look at fewer examples in ring one, before tests read the number."""
    if config.getoption("ring") == ONE:
        settings.load_profile("ring-one")


class StackScheduling(LoadFileScheduling):
    """Of xdist: all tests of a stack on one worker, and otherwise those of a file."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        taken = list(self.assigned_work.get(node, ()))
        before = taken[-1] if taken else None
        is_last = node is self.nodes[-1]
        stacks = sum(
            group in FIXTURES and not all(tests.values())
            for other, groups in self.assigned_work.items()
            if other is not node
            for group, tests in groups.items()
        )
        group = next_group(self.workqueue, before, is_last_worker=is_last, stacks_elsewhere=stacks)
        self.workqueue.move_to_end(group, last=False)  # from where xdist takes it
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Refine `--dist=loadfile`."""
    return StackScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of another ring: each worker would import them for nothing."""
    if collection_path.suffix != ".py":
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    return None if is_of(config.getoption("ring"), file) else True


# Of Hypothesis, which has no public way to change a test's own settings.
_OWN_SETTINGS = "_hypothesis_internal_use_settings"


def _look_at_fewer(items: list[pytest.Item]) -> None:
    """Let tests with a number of examples of their own look at as many as ring one does."""
    seen: set[Any] = set()
    for item in items:
        owner, name = getattr(item, "cls", None), "settings"  # of a state machine
        if not isinstance(getattr(owner, name, None), settings):
            test = getattr(item, "obj", None)
            owner, name = getattr(test, "__func__", test), _OWN_SETTINGS
        own = getattr(owner, name, None)
        if owner in seen or not isinstance(own, settings):
            continue
        seen.add(owner)
        setattr(owner, name, settings(own, max_examples=examples_of_one(own.max_examples)))


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at what imports have made, again and again."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests of a stack together, and what takes longest first."""
    if config.getoption("ring") == ONE:
        _look_at_fewer(items)
    of_stacks = (item for item in items if group_of(item.nodeid) in FIXTURES)
    for item in of_stacks:
        if problem := misplaced(item.nodeid, getattr(item, "fixturenames", ())):
            raise pytest.UsageError(problem)
    items[:] = [items[place] for place in longest_first([item.nodeid for item in items])]
