"""Samples the resident memory of processes during a load, and fits its slope."""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

Sample = tuple[float, float]
"""Seconds since the begin of the load, and resident MB."""


def slope_mb_per_min(samples: Sequence[Sample]) -> float:
    """Return the least-squares slope of the last half of samples. Needs three samples or more."""
    half = samples[len(samples) // 2 :]
    fitted = statistics.linear_regression([it[0] for it in half], [it[1] for it in half])
    return round(fitted.slope * 60, 2)


@dataclass(slots=True)
class MemorySamples:
    """Resident memory of processes, sampled until the task is cancelled.

    Attributes:
        pids: Returns the id of each process, by name. A restarted process has another id.
        names: Names of the sampled processes.
        every_s: Seconds between samples.
        by_name: The samples so far.
    """

    pids: Callable[[], dict[str, int]]
    names: Iterable[str]
    every_s: float = 10.0
    by_name: dict[str, list[Sample]] = field(default_factory=dict[str, list[Sample]])

    async def run(self) -> None:
        """Sample for ever."""
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(self.every_s)
            pids = self.pids()
            for name in self.names:
                resident_mb = _resident_mb(pids[name])
                if resident_mb is not None:
                    sample = (round(time.monotonic() - began_s, 1), resident_mb)
                    self.by_name.setdefault(name, []).append(sample)

    def figures(self) -> dict[str, object]:
        """Return the samples and slopes by name."""
        return {
            "resident_mb": {name: [it[1] for it in got] for name, got in self.by_name.items()},
            "slope_mb_per_min": {name: slope_mb_per_min(it) for name, it in self.by_name.items()},
        }


def _resident_mb(pid: int) -> float | None:
    """Return the resident memory of a process and its descendants, or None if it has ended."""
    try:
        root = psutil.Process(pid)
        whole = (root, *root.children(recursive=True))
        return round(sum(it.memory_info().rss for it in whole) / 1e6, 1)
    except psutil.NoSuchProcess:
        return None
