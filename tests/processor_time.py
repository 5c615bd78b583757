"""A plugin of pytest: the processor time of each file, and of all processes that its tests start.

`python -m pytest -p tests.processor_time FILES` (with any number of workers) writes
build/processor_time.json: for each file its tests, seconds of them, their processor seconds and
those of its import, and every test that takes a processor second or more. Fixtures count for the
test that asks for them first, and those that others share end after the last. The time of a process
that was orphaned before it ended is not counted.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_FILE = Path("build/processor_time.json")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LONG_S = 1.0  # from here on, a test has a line of its own
_KEY = "processor_time"  # under which a worker hands its rows to the controller

# Of a file: tests, seconds, processor seconds of tests and of the import.
Row = list[float]


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _children(int(child))


def _ticks(pid: int) -> int:
    """Return what a process used, and the children that it has reaped."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))
    return 0


def _used_s() -> float:
    """Return what this process, its children and all that they have reaped used."""
    reaped = os.times()
    running = sum(map(_ticks, _children(os.getpid())))
    return (
        time.process_time() + reaped.children_user + reaped.children_system + running / _TICKS_PER_S
    )


class _Meter:
    def __init__(self) -> None:
        self.files: dict[str, Row] = {}
        self.long: dict[str, float] = {}
        self._at = (time.monotonic(), _used_s())

    def _row(self, file: str) -> Row:
        return self.files.setdefault(file, [0, 0.0, 0.0, 0.0])

    def _passed(self) -> tuple[float, float]:
        before, self._at = self._at, (time.monotonic(), _used_s())
        return self._at[0] - before[0], self._at[1] - before[1]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        before = time.process_time()
        report = yield
        if isinstance(collector, pytest.Module):
            self._row(collector.nodeid)[3] += time.process_time() - before
        return report

    def pytest_collection_finish(self) -> None:
        self._passed()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds, used_s = self._passed()
        row = self._row(nodeid.split("::", 1)[0])
        row[0] += 1
        row[1] += seconds
        row[2] += used_s
        if used_s >= _LONG_S:
            self.long[nodeid] = used_s

    def add(self, files: dict[str, Row], long: dict[str, float]) -> None:
        """Count a worker's rows; each worker imports all files."""
        for file, row in files.items():
            own = self._row(file)
            own[:] = [a + b for a, b in zip(own, row, strict=True)]
        self.long |= long


class _Run(_Meter):
    def pytest_sessionfinish(self) -> None:
        rows = sorted(self.files.items(), key=lambda row: -row[1][2])
        long = sorted(self.long.items(), key=lambda row: -row[1])
        found = {
            "processor_s": round(sum(row[2] + row[3] for _, row in rows), 1),
            "files": {file: [round(figure, 2) for figure in row] for file, row in rows},
            "long_tests": {test: round(used_s, 2) for test, used_s in long},
        }
        _FILE.parent.mkdir(exist_ok=True)
        _FILE.write_text(json.dumps(found, indent=1) + "\n")


class _Controller(_Run):
    """Of a run with workers: it runs no tests, and is told of each."""

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        del nodeid

    def pytest_testnodedown(self, node: Any) -> None:
        self.add(*getattr(node, "workeroutput", {}).get(_KEY, ({}, {})))


class _Worker(_Meter):
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, object] = getattr(session.config, "workeroutput")  # noqa: B009 - of xdist
        output[_KEY] = (self.files, self.long)


def pytest_configure(config: pytest.Config) -> None:
    """Measure from here on."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Worker())
    elif config.getoption("numprocesses", default=None):
        config.pluginmanager.register(_Controller())
    else:
        config.pluginmanager.register(_Run())
