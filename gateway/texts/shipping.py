"""Sends retained texts to the broker by a separate producer, created for the first text.

Most workers never retain a text, so they need no thread and no connection for texts.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from sluice.events import EventProducer
from sluice.wire.telemetry.v1.text_pb2 import TextEvent

log = structlog.get_logger(__name__)

_EARLY_MAX = 64  # texts that wait until the producer is created
_RETRY_S = 5.0


def is_over(payload: bytes) -> bool:
    """Return whether the retention of a text has ended."""
    try:
        return TextEvent.FromString(payload).expires_at_unix_ms <= time.time() * 1000
    except DecodeError:
        return False


class TextShipping:
    """The producer of one worker's texts. `run` has to run in a TaskGroup, and `close` ends it."""

    def __init__(self, make: Callable[[], EventProducer], spool_directory: Path) -> None:
        """`make` creates the producer for the first text or for an earlier run's spool."""
        self._make = make
        self._spool_directory = spool_directory
        self._producer: EventProducer | None = None
        self._early: deque[bytes] = deque()
        self._early_drops = 0
        self._is_wanted = asyncio.Event()

    @property
    def dropped(self) -> int:
        """Number of texts lost because disk or memory was full, or usage events needed the disk."""
        return self._early_drops + (self._producer.stats.dropped if self._producer else 0)

    @property
    def spool_bytes(self) -> int:
        """Number of bytes of texts in the spool."""
        return self._producer.stats.spool_bytes if self._producer else 0

    def ship(self, event: TextEvent) -> None:
        """Queue a text without blocking."""
        payload = event.SerializeToString()
        if self._producer is not None:
            self._producer.emit(payload)
        elif len(self._early) < _EARLY_MAX:
            self._early.append(payload)
            self._is_wanted.set()
        else:
            self._early_drops += 1

    async def run(self) -> None:
        """Create the producer once, when it is first needed."""
        if not await asyncio.to_thread(self._has_some):
            await self._is_wanted.wait()
        while self._producer is None:
            try:
                self._producer = await asyncio.to_thread(self._make)
            except (OSError, RuntimeError) as error:
                log.warning("texts_not_shipped", error=repr(error))
                await asyncio.sleep(_RETRY_S)
        while self._early:
            self._producer.emit(self._early.popleft())

    async def close(self, timeout_s: float) -> None:
        """Flush, and write the remaining texts to the spool."""
        if self._producer is not None:
            await asyncio.to_thread(self._producer.close, timeout_s)

    def _has_some(self) -> bool:
        return any(self._spool_directory.glob("*/*.spool"))
