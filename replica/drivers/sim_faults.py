"""Decides when a simulated engine has faults, according to a plan.

The plan is data, so the same plan can be used in a real Triton and in simulated time. It is a JSON
array:

    [{"kind": "stall", "at_s": 5, "amount": 3},
     {"kind": "slow", "at_step": 100, "amount": 4, "for_s": 10},
     {"kind": "corrupt"}, {"kind": "fail"}, {"kind": "die", "at_s": 60}]

`at_s` and `at_step` are relative to the start of the plan. A fault without either is due at once.
Faults act during steps, so an idle engine has none. This module only decides which faults are due,
and the backend applies them.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, cast


class FaultKind(StrEnum):
    """The kind of a fault, which defines the meaning of its `amount`.

    STALL: seconds for which the step, and thus the whole engine, stalls.
    SLOW: factor of the duration of each step for `for_s` seconds. If `for_s` is 0, the factor
    applies until the next SLOW fault.
    DIE: unused, because the process exits.
    CORRUPT: number of sequences of a step that receive a wrong token (at least 1).
    FAIL: number of consecutive steps that fail (at least 1).
    """

    STALL = "stall"
    SLOW = "slow"
    DIE = "die"
    CORRUPT = "corrupt"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class EngineFault:
    """One fault of a plan. The module's docstring and `FaultKind` explain the fields."""

    kind: FaultKind
    at_s: float = 0.0
    at_step: int = 0
    amount: float = 1.0
    for_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for negative times or an impossible amount."""
        smallest = 1e-9 if self.kind is FaultKind.SLOW else 0.0
        times = (self.at_s, self.at_step, self.for_s)
        if min(times) < 0 or self.amount < smallest or not all(map(math.isfinite, times)):
            raise ValueError(f"{self}: times must not be negative, nor the amount (slow: above 0)")


class FaultPlan:
    """The faults of a plan that are not due yet, and the present slowdown."""

    def __init__(self, faults: Iterable[EngineFault], now_s: float, step: int) -> None:
        """Start a plan at time `now_s`, before step number `step`."""
        self._pending = list(faults)
        self._began_s = now_s
        self._began_step = step
        self._factor = 1.0
        self._slow_until_s = math.inf

    def take(self, now_s: float, step: int) -> list[EngineFault]:
        """Return the faults that are due in this step, in the plan's order, and each only once."""
        due = [
            fault
            for fault in self._pending
            if now_s - self._began_s >= fault.at_s and step - self._began_step >= fault.at_step
        ]
        if due:
            self._pending = [fault for fault in self._pending if fault not in due]
        for fault in due:
            if fault.kind is FaultKind.SLOW:
                self._factor = fault.amount
                self._slow_until_s = now_s + fault.for_s if fault.for_s else math.inf
        return due

    def factor(self, now_s: float) -> float:
        """Return the factor by which steps take longer at this time."""
        return self._factor if now_s < self._slow_until_s else 1.0


def parse_faults(text: str) -> list[EngineFault]:
    """Return the faults of a JSON array, or none for empty text. Raises ValueError if invalid."""
    if not text.strip():
        return []
    document = json.loads(text)
    if type(document) is not list:
        raise ValueError("a fault plan is a JSON array of objects")
    return [_fault(entry) for entry in cast("list[Any]", document)]


def _fault(entry: Any) -> EngineFault:
    known = {item.name for item in fields(EngineFault)}
    if not isinstance(entry, dict) or not known >= entry.keys():
        raise ValueError(f"{entry!r} is not a fault; its fields are {', '.join(sorted(known))}")
    values = cast("dict[str, Any]", entry)
    try:
        kind = FaultKind(values.get("kind"))
    except ValueError:
        raise ValueError(
            f"{values.get('kind')!r} is no kind of fault; known are {', '.join(FaultKind)}"
        ) from None
    numbers = {name: value for name, value in values.items() if name != "kind"}
    for name, value in numbers.items():
        if type(value) not in (int, float):
            raise ValueError(f"{name} of the fault {kind} is {value!r}; a number is needed")
    return EngineFault(kind, **numbers)


class FaultFile:
    """A file with the fault plan of a running engine. Each change of the file is a new plan."""

    def __init__(self, path: Path) -> None:
        """Watch `path`. Its present content is the first new plan."""
        self._path = path
        self._seen: tuple[int, int] | None = None

    def read(self) -> list[EngineFault] | None:
        """Return the new plan, or None if the file is unchanged.

        Raises ValueError if the content is not a plan.
        """
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_size)
            if seen == self._seen:
                return None
            self._seen = seen
            return parse_faults(self._path.read_text())
        except FileNotFoundError:
            was_there, self._seen = self._seen is not None, None
            return [] if was_there else None
