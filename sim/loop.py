"""An asyncio event loop on virtual time: `asyncio.sleep(3600)` takes no time at all.

The selector polls without waiting; when nothing is ready, the time the loop would have waited is
added to its clock. Code that takes its time from the loop obeys: `asyncio.sleep`,
`asyncio.timeout`,
third-party code. Code that waits elsewhere (threads, gRPC's own poller) does not belong here;
threads
are refused, because nothing would advance the clock for them in order.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T")


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is set: no event can ever come."""


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that never waits: it returns ready events, or moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("all tasks wait and no timer is set")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. Time starts at 0 and moves only when nothing is ready to run."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._virtual.now_s

    def stand_still(self, seconds: float) -> None:
        """Let time pass while nothing runs, as when the process is stopped."""
        self._virtual.now_s += seconds

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # noqa: ARG002
        """Refuse: threads run in real time."""
        raise RuntimeError("no threads under virtual time")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end on a virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
