"""An asyncio event loop on virtual time, where `asyncio.sleep(3600)` ends without any real delay.

The selector polls without waiting. When no event is ready, the time that the loop would have waited
is added to its clock. All code that uses the loop's clock runs on virtual time, for example
`asyncio.sleep`, `asyncio.timeout`, and libraries built on them. Code that waits outside the loop
(threads, gRPC's own poller) cannot run here. Threads are refused, because the clock would not wait
for them.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T")


class DeadlockError(RuntimeError):
    """Raised when every task waits and no timer is set, so that no event can ever occur."""


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that never waits, because it returns ready events or advances the clock."""

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
    """An event loop whose time starts at 0 and advances only when no callback is ready."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return virtual seconds since the creation of the loop."""
        return self._virtual.now_s

    def stand_still(self, seconds: float) -> None:
        """Advance the clock without running callbacks, as if the process were suspended."""
        self._virtual.now_s += seconds

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # noqa: ARG002
        """Raise RuntimeError, because threads run in real time."""
        raise RuntimeError("no threads under virtual time")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end on a virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
