"""A bounded queue that writes chat completions to PostgreSQL in the background."""

import asyncio
from collections import deque
from contextlib import suppress

import structlog

from gateway.records.sealed import SealedRecords
from sluice.errors import PlatformError, RejectedError
from sluice.lifecycle import backoff_s
from sluice.stored_content import CHAT_COMPLETION
from sluice.wire.state.v1 import state_pb2 as wire

log = structlog.get_logger(__name__)

KIND = CHAT_COMPLETION
_WAITING_MAX, _WAITING_BYTES_MAX = 1000, 32 << 20
# Maximum size in bytes of a completion, below gRPC's limit of 4 MiB per message.
RECORD_BYTES_MAX = 3 << 20


class CompletionKeeper:
    """One worker's queue of completions to store. `run` must run in a TaskGroup."""

    def __init__(self, records: SealedRecords) -> None:
        """Start with an empty queue."""
        self._records = records
        self._waiting: deque[wire.CreateRecordRequest] = deque()
        self._bytes = 0
        self._has_some, self._is_empty = asyncio.Event(), asyncio.Event()
        self._is_empty.set()

    def offer(self, created: wire.CreateRecordRequest) -> None:
        """Queue a completion. If it is too large or the queue is full, log it and drop it."""
        size = created.ByteSize()
        has_room = len(self._waiting) < _WAITING_MAX and self._bytes + size <= _WAITING_BYTES_MAX
        if size > RECORD_BYTES_MAX or not has_room:
            log.warning("completion_not_stored", id=created.record.id, bytes=size)
            return
        self._waiting.append(created)
        self._bytes += size
        self._has_some.set()
        self._is_empty.clear()

    async def run(self) -> None:
        """Write queued completions to PostgreSQL until cancelled."""
        attempt = 0
        while True:
            await self._has_some.wait()
            while self._waiting:
                created = self._waiting[0]
                try:
                    await self._records.create(created.record, created.items)
                except RejectedError:
                    attempt += 1
                    await asyncio.sleep(backoff_s(attempt, first_s=0.1, max_s=5.0))
                    continue
                except PlatformError as error:
                    log.warning("completion_not_stored", id=created.record.id, reason=str(error))
                attempt = 0
                self._waiting.popleft()
                self._bytes -= created.ByteSize()
            self._has_some.clear()
            self._is_empty.set()

    async def settled(self, timeout_s: float) -> None:
        """Wait until the queue is empty, for at most `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
