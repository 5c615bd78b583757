"""A plugin of pytest: the processor time of each file's tests, and of all processes they start.

`python -m pytest -n 0 -p tests.processor_time FILES` writes build/processor_time.json: for each file
its tests, seconds and processor seconds. Time of what was orphaned before it ended is not counted.
"""

import json
import time
from pathlib import Path

import psutil
import pytest

_FILE = Path("build/processor_time.json")


def _used_s() -> float:
    """Return what this process, its children and all that they have reaped used."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


class _Meter:
    def __init__(self) -> None:
        self._files: dict[str, tuple[int, float, float]] = {}
        self._at = (time.monotonic(), _used_s())

    def pytest_collection_finish(self) -> None:
        self._at = (time.monotonic(), _used_s())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        now = (time.monotonic(), _used_s())
        file = nodeid.split("::", 1)[0]
        tests, seconds, used_s = self._files.get(file, (0, 0.0, 0.0))
        self._files[file] = (
            tests + 1,
            seconds + now[0] - self._at[0],
            used_s + now[1] - self._at[1],
        )
        self._at = now

    def pytest_sessionfinish(self) -> None:
        rows = sorted(self._files.items(), key=lambda row: -row[1][2])
        found = {file: [n, round(s, 2), round(used_s, 2)] for file, (n, s, used_s) in rows}
        _FILE.parent.mkdir(exist_ok=True)
        _FILE.write_text(json.dumps(found, indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Measure from here on."""
    config.pluginmanager.register(_Meter())
