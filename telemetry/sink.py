"""The loop that moves events: read a batch, write it, and only then commit its offsets.

While one batch is written the next one is read and decoded, and no more than that: at most two
batches are in memory. The sink survives the failure of both peers. After any failure, memory holds
nothing that the broker would not deliver again: the membership is closed, and a new session begins
after a pause.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from confluent_kafka import KafkaException

from sluice.lifecycle import backoff_s
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from telemetry import rows
from telemetry.consumer import ConsumerLostError
from telemetry.metrics import TelemetryMetrics
from telemetry.rows import BrokerMessage, RowBatch
from telemetry.store import STORE_ERRORS

log = structlog.get_logger(__name__)

_SESSION_ERRORS = (*STORE_ERRORS, KafkaException, ConsumerLostError)
_PAUSE_FIRST_S = 0.25
_PAUSE_MAX_S = 5.0
# A write is retried inside the membership for this long, far less than the 300 s after which the
# group would take the partitions away.
_WRITE_RETRY_S = 60.0
_LAG_EVERY_S = 5.0


class BrokerReader(Protocol):
    """The broker, as the sink sees it (`telemetry.consumer.EventConsumer`)."""

    @property
    def is_assigned(self) -> bool:
        """Whether partitions are assigned."""
        ...

    @property
    def missing(self) -> int:
        """Number of messages that were deleted before they were read, since `open`."""
        ...

    async def open(self) -> None:
        """Join."""
        ...

    async def read(self, batch_max: int) -> list[BrokerMessage]:
        """Return the next messages."""
        ...

    async def written(self, messages: Sequence[BrokerMessage]) -> None:
        """Commit these messages."""
        ...

    async def lag(self) -> int:
        """Return the number of unread messages."""
        ...

    async def is_drained(self) -> bool:
        """Return whether all present messages were read."""
        ...

    async def close(self) -> None:
        """Leave."""
        ...


class Writer(Protocol):
    """ClickHouse, as the sink sees it (`telemetry.store.Store`)."""

    async def prepare(self) -> object:
        """Connect and migrate."""
        ...

    async def insert(self, batch: RowBatch) -> None:
        """Write the whole batch, or raise."""
        ...


@dataclass(frozen=True, slots=True)
class _Read:
    """The messages of one read of the broker, and their decoded rows."""

    messages: list[BrokerMessage] = field(default_factory=list[BrokerMessage])
    batch: RowBatch = field(default_factory=RowBatch)


class Sink:
    """Moves events until it is drained or cancelled."""

    def __init__(
        self,
        reader: Callable[[], BrokerReader],
        writer: Writer,
        metrics: TelemetryMetrics,
        *,
        batch_max: int,
        on_written: Callable[[Sequence[RequestEvent]], None] = lambda _: None,
        decode: Callable[[Sequence[BrokerMessage]], RowBatch] = rows.decode,
        are_texts: bool = False,
    ) -> None:
        """Prepare.

        Args:
            reader: Makes the reader of a session.
            writer: ClickHouse.
            metrics: Metrics of this sink.
            batch_max: Most messages in a batch.
            on_written: Called with events that are in ClickHouse, perhaps more than once.
            decode: Sorts messages of the topic.
            are_texts: Whether the topic is that of texts, for logs.
        """
        self._decode = decode
        self._own = metrics.of_texts if are_texts else metrics.of_events
        self._reader = reader
        self._writer = writer
        self._metrics = metrics
        self._batch_max = batch_max
        self._on_written = on_written
        self._attempt = 0
        self._is_draining = False
        self._is_write_failing = False
        self._lag_at_s = 0.0
        self.is_ready = False

    def drain(self) -> None:
        """Let `run` return once all messages are read, or at the next failure.

        So the last events of stopped gateways are written before the broker stops: the local
        stack's broker loses its messages.
        """
        self._is_draining = True

    async def run(self) -> None:
        """Run sessions one after the other; after each failure a pause, doubling up to 5 s."""
        while not self._is_draining:
            try:
                await self._session()
            except _SESSION_ERRORS as error:
                self._own.session_failures.inc()
                log.warning("sink_session_failed", error=repr(error), attempt=self._attempt)
            finally:
                self._set_ready(ready=False)
            if self._is_draining:
                return
            pause_s = backoff_s(self._attempt, first_s=_PAUSE_FIRST_S, max_s=_PAUSE_MAX_S)
            self._attempt += 1
            await asyncio.sleep(pause_s)

    async def _session(self) -> None:
        await self._writer.prepare()
        self._is_write_failing = False
        reader = self._reader()
        try:
            await reader.open()
            await self._move(reader)
        finally:
            # Also when cancelled: closing commits what is written, and leaves the group at once.
            await asyncio.shield(reader.close())

    async def _move(self, reader: BrokerReader) -> None:
        ahead = _Read()
        while ahead.messages or not (self._is_draining and await reader.is_drained()):
            # Not a TaskGroup: when a part of it fails, Python 3.11's forgets that it was cancelled.
            read, failure = await asyncio.gather(
                self._read(reader), self._settle(reader, ahead), return_exceptions=True
            )
            if isinstance(failure, BaseException):
                raise failure
            if isinstance(read, BaseException):
                raise read
            ahead = read
            self._attempt = 0
            if time.monotonic() >= self._lag_at_s:
                self._own.lag.set(await reader.lag())
                self._lag_at_s = time.monotonic() + _LAG_EVERY_S

    async def _read(self, reader: BrokerReader) -> _Read:
        missing = reader.missing
        messages = await reader.read(self._batch_max)
        self._set_ready(ready=reader.is_assigned and not self._is_write_failing)
        if reader.missing > missing:
            log.error("messages_missing", count=reader.missing - missing)
            self._own.missing.inc(reader.missing - missing)
        return _Read(messages, await asyncio.to_thread(self._decode, messages))

    async def _settle(self, reader: BrokerReader, read: _Read) -> None:
        if read.messages:
            await self._write(read.batch)
            # Never before the write: a crash in between must bring the messages again.
            await reader.written(read.messages)

    async def _write(self, batch: RowBatch) -> None:
        """Write a batch with retries for a minute; the last error goes to the caller."""
        give_up_at = time.monotonic() + _WRITE_RETRY_S
        attempt = 0
        while True:
            started_at = time.monotonic()
            try:
                await self._writer.insert(batch)
            except STORE_ERRORS as error:
                self._own.write_failures.inc()
                self._is_write_failing = True
                self._set_ready(ready=False)
                log.warning(
                    "batch_not_written",
                    error=repr(error),
                    events=len(batch.events),
                    texts=len(batch.texts),
                )
                pause_s = backoff_s(attempt, first_s=_PAUSE_FIRST_S, max_s=_PAUSE_MAX_S)
                if self._is_draining or time.monotonic() + pause_s > give_up_at:
                    raise
                await asyncio.sleep(pause_s)
                attempt += 1
            else:
                self._is_write_failing = False
                self._own.write_seconds.observe(time.monotonic() - started_at)
                self._count(batch)
                self._on_written([*batch.events, *batch.tool_calls])
                return

    def _count(self, batch: RowBatch) -> None:
        self._metrics.events_written.inc(len(batch.events))
        self._metrics.closings.inc(len(batch.closings))
        self._metrics.texts.inc(len(batch.texts))
        self._own.duplicates.inc(batch.duplicates)
        self._own.forged.inc(batch.forged)
        if batch.forged:
            log.error("messages_forged", count=batch.forged)
        for poison in batch.poisons:
            self._own.poisoned.labels(reason=poison.reason).inc()
            log.warning(
                "message_poisoned",
                reason=poison.reason,
                detail=poison.detail,
                partition=poison.source.partition,
                offset=poison.source.offset,
            )

    def _set_ready(self, *, ready: bool) -> None:
        self.is_ready = ready
        self._own.is_ready.set(ready)
