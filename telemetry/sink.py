"""Reads a batch of events from the broker, writes it to ClickHouse, and then commits its offsets.

While one batch is written, the next batch is read and decoded, so at most two batches are in
memory. The sink survives failures of the broker and of ClickHouse. After a failure, the sink leaves
the consumer group, pauses, and joins the group again. The broker then delivers all unwritten
messages again.
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
# Seconds for which a failed write is retried without leaving the group. After 300 s, the group
# would assign the partitions to another member.
_WRITE_RETRY_S = 60.0
_LAG_EVERY_S = 5.0


class BrokerReader(Protocol):
    """The reader of the broker that a sink uses, implemented by `EventConsumer`."""

    @property
    def is_assigned(self) -> bool:
        """Whether the group has assigned partitions to this member, perhaps none."""
        ...

    @property
    def missing(self) -> int:
        """Number of messages since `open` that the broker deleted before they were read."""
        ...

    async def open(self) -> None:
        """Join the consumer group."""
        ...

    async def read(self, batch_max: int) -> list[BrokerMessage]:
        """Return the next messages."""
        ...

    async def written(self, messages: Sequence[BrokerMessage]) -> None:
        """Record that messages were written, so that their offsets are committed."""
        ...

    async def lag(self) -> int:
        """Return the number of unread messages."""
        ...

    async def is_drained(self) -> bool:
        """Return whether all messages in the broker at the time of the call were read."""
        ...

    async def close(self) -> None:
        """Leave the consumer group."""
        ...


class Writer(Protocol):
    """The store that a sink writes to, implemented by `telemetry.store.Store`."""

    async def prepare(self) -> object:
        """Connect, and migrate the tables."""
        ...

    async def insert(self, batch: RowBatch) -> None:
        """Write the whole batch, or raise an error."""
        ...


@dataclass(frozen=True, slots=True)
class _Read:
    """The messages of one read from the broker, and their decoded rows."""

    messages: list[BrokerMessage] = field(default_factory=list[BrokerMessage])
    batch: RowBatch = field(default_factory=RowBatch)


class Sink:
    """Moves messages from the broker to ClickHouse until drained or cancelled."""

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
        """Create a sink that connects when it runs.

        Args:
            reader: Function that returns a new reader. The sink calls it each time it joins the
                group.
            writer: Store to which the sink writes.
            metrics: Metrics of this sink.
            batch_max: Largest number of messages in a batch.
            on_written: Function that is called with written events, perhaps more than once per
                event.
            decode: Function that decodes the messages of the topic into rows.
            are_texts: Whether the topic has texts instead of events. The metrics differ.
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
        """End `run` once all messages are read, or at the next failure.

        The local stack's broker loses its messages when it stops. So before the broker stops, the
        stack drains the sink, in order to write the last events of stopped gateways.
        """
        self._is_draining = True

    async def run(self) -> None:
        """Join the group again after each failure. The pause before it doubles up to 5 s."""
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
            # The reader is closed even when the task is cancelled. The close commits the offsets of
            # written messages and leaves the group at once.
            await asyncio.shield(reader.close())

    async def _move(self, reader: BrokerReader) -> None:
        ahead = _Read()
        while ahead.messages or not (self._is_draining and await reader.is_drained()):
            # asyncio.gather replaces a TaskGroup here. In Python 3.11, a failure within a TaskGroup
            # can suppress a cancellation.
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
            # The offsets are committed after the write. If the process crashes in between, the
            # broker delivers the messages again.
            await reader.written(read.messages)

    async def _write(self, batch: RowBatch) -> None:
        """Write a batch with retries for up to a minute. Raises the last error after that."""
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
