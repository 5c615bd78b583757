"""Puts the engine to sleep and wakes it, in the step loop.

Another thread allocates the memory that a woken engine needs, because the allocation is slow.
"""

from typing import Any

from replica.engine.driver import Driver, Sleeper
from replica.engine.types import RefusedError
from replica.host.adapters import Background
from replica.host.attachments import Reply, refused_frame
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS
from sluice.wire.engine.v1 import engine_pb2 as wire

# KV blocks that a sleeping engine retains, so that the model can still compute short probes
ASLEEP_BLOCKS = 4
ASLEEP_TOKENS = ASLEEP_BLOCKS * BLOCK_TOKENS


class RestDesk:
    """Answers requests to put the engine to sleep and to wake it."""

    def __init__(self, driver: Driver, background: Background) -> None:
        self._driver = driver
        self._background = background
        self._waking: list[Reply] = []
        self._is_waking = False
        # Allocated memory of an engine that is to wake, which is used once no sequence runs
        self._memory: Any = None
        self.is_asleep = False

    def rest(self, message: wire.Rest, reply: Reply, held: int) -> None:
        """Put the engine to sleep or wake it, and then send the answer.

        Args:
            message: Request to sleep or to wake.
            reply: Function that sends the answer.
            held: Number of routers' sequences. An engine with any sequence stays awake.
        """
        driver = self._driver
        if not isinstance(driver, Sleeper):
            text = f"engine {driver.name} cannot sleep: set the pool's sleepers to 0"
            reply(refused_frame(RefusedError(ErrorCode.UNSUPPORTED_PARAMETER, text)))
        elif message.is_asleep == self.is_asleep and not self._is_waking:
            reply(_rested(is_asleep=self.is_asleep))
        elif not message.is_asleep:
            self._waking.append(reply)
            self.wake()
        elif self._is_waking or held or not driver.sleep(ASLEEP_BLOCKS):
            text = "the engine holds sequences, or is waking: it sleeps when it is idle"
            reply(refused_frame(RefusedError(ErrorCode.ENGINE_BUSY, text)))
        else:
            self.is_asleep = True
            reply(_rested(is_asleep=True))

    def wake(self) -> None:
        """Start to allocate memory for waking, unless that has started already."""
        driver = self._driver
        if self.is_asleep and not self._is_waking and isinstance(driver, Sleeper):
            self._is_waking = True
            if not self._background.run(driver.restored, self._restored):
                self._restored(MemoryError("too much is done beside the steps"))

    def look(self) -> None:
        """Use the allocated memory before a step, if there is any and no sequence runs."""
        driver = self._driver
        if self._memory is not None and not driver.has_work and isinstance(driver, Sleeper):
            driver.wake(self._memory)
            self._memory = None
            self.is_asleep = False
            self._end_waking(_rested(is_asleep=False))

    def _restored(self, outcome: Any) -> None:
        if not isinstance(outcome, Exception):
            self._memory = outcome
            return
        text = f"the engine has no memory to wake: {outcome}"
        self._end_waking(refused_frame(RefusedError(ErrorCode.ENGINE_BUSY, text)))

    def _end_waking(self, frame: wire.HostFrame) -> None:
        self._is_waking = False
        for reply in self._waking:
            reply(frame)
        self._waking.clear()


def _rested(*, is_asleep: bool) -> wire.HostFrame:
    return wire.HostFrame(rested=wire.Rested(is_asleep=is_asleep))
