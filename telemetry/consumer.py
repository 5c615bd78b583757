"""Reads events from the broker as a member of a consumer group, in a dedicated thread.

Offsets are stored only after the caller reports that the messages were written. The client commits
stored offsets in the background and on `close`. So if a crash interrupts a write, its messages are
read again and never skipped.

The group's name ends with the id of the Kafka cluster, because an offset of one cluster is
meaningless in another. A broker that has lost its data is a new cluster, for example the local
stack's broker after a restart. Its topic is then read from the beginning.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from sluice.event_proof import is_genuine
from sluice.kafka import security
from telemetry.offsets import OffsetTracker
from telemetry.rows import BrokerMessage

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Errors after which the client recovers without a new membership. For example, the topic does not
# exist yet, a partition's leader moves, or a poll was too late.
_PASSING = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError._MAX_POLL_EXCEEDED,  # noqa: SLF001 - the client's own codes have names of this form
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
}
_METADATA_S = 5.0
_CLOSE_S = 10.0


class ConsumerLostError(RuntimeError):
    """The membership in the consumer group has ended, so the caller must open a new one."""


class EventConsumer:
    """A member of the consumer group.

    The caller calls `open` once, then `read` and `written` alternately, and `close` at the end.

    Attributes:
        is_assigned: Whether the group has assigned partitions to this member, perhaps none.
        missing: Number of messages since `open` that the broker deleted before they were read.
    """

    def __init__(
        self, bootstrap: str, topic: str, group: str, *, protocol: str, batch_wait_s: float
    ) -> None:
        self._topic = topic
        self._group = group
        self._batch_wait_s = batch_wait_s
        self._is_lost = False
        self.is_assigned = False
        self.missing = 0
        self._offsets = OffsetTracker()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="consumer")
        self._consumer: Consumer | None = None
        self._config: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "client.id": "sluice-telemetry",
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.offset.store": False,
            "enable.auto.commit": True,
            "auto.commit.interval.ms": 1000,
            "topic.metadata.refresh.interval.ms": 10_000,
            "allow.auto.create.topics": False,
            "reconnect.backoff.max.ms": 1000,
            "queued.max.messages.kbytes": 65_536,
            "log_level": 2,
            **security(),
        }

    async def open(self) -> None:
        """Join the group.

        Raises:
            KafkaException: The broker does not answer.
        """
        await self._call(self._open)

    async def read(self, batch_max: int) -> list[BrokerMessage]:
        """Return the next messages, or none if none arrive within `batch_wait_s`.

        Raises:
            ConsumerLostError: Partitions were lost, or the client failed permanently.
        """
        return await self._call(self._read, batch_max)

    async def written(self, messages: Sequence[BrokerMessage]) -> None:
        """Record that messages were written to the store, so that they are not read again."""
        ends: dict[int, int] = {}
        for message in messages:
            ends[message.partition] = max(ends.get(message.partition, 0), message.offset + 1)
        await self._call(self._store, ends)

    async def lag(self) -> int:
        """Return the number of unread messages in the assigned partitions."""
        return await self._call(self._lag)

    async def is_drained(self) -> bool:
        """Return whether all messages in the broker at the time of the call were read.

        Raises:
            KafkaException: The broker does not answer.
        """
        return await self._call(self._is_drained)

    async def close(self) -> None:
        """Commit stored offsets and leave the group. A timeout is logged, not raised."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._call(self._close)
        except TimeoutError:
            log.warning("consumer_close_timed_out", after_s=_CLOSE_S)
        self._thread.shutdown(wait=False)

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    # The functions below run in the consumer's thread.

    def _open(self) -> None:
        probe = Consumer({**self._config, "group.id": f"{self._group}.probe"})
        try:
            cluster_id = probe.list_topics(timeout=_METADATA_S).cluster_id
        finally:
            probe.close()
        group = group_in_cluster(self._group, cluster_id)
        consumer = Consumer({**self._config, "group.id": group})
        consumer.subscribe([self._topic], on_assign=self._on_assign, on_lost=self._on_lost)
        self._consumer = consumer
        log.info("group_joined", group=group, topic=self._topic)

    def _read(self, batch_max: int) -> list[BrokerMessage]:
        assert self._consumer is not None
        messages = self._consumer.consume(batch_max, self._batch_wait_s)
        sources: list[BrokerMessage] = []
        for message in messages:
            error = message.error()
            if error is None:
                sources.append(self._source(message))
            elif error.fatal() or error.code() not in _PASSING:
                raise ConsumerLostError(error.str())
            else:
                log.warning("consumer_interrupted", error=error.str())
        if self._is_lost:
            raise ConsumerLostError("the broker forgot this member")
        self.missing += self._offsets.missing(sources)
        return sources

    def _source(self, message: Message) -> BrokerMessage:
        partition, offset, payload = message.partition(), message.offset(), message.value()
        assert partition is not None
        assert offset is not None
        payload = payload if type(payload) is bytes else b""
        genuine = is_genuine(self._topic, payload, message.headers() or ())
        return BrokerMessage(self._topic, partition, offset, payload, genuine)

    def _store(self, ends: Mapping[int, int]) -> None:
        assert self._consumer is not None
        for partition, offset in ends.items():
            try:
                self._consumer.store_offsets(
                    offsets=[TopicPartition(self._topic, partition, offset)]
                )
            except KafkaException as error:
                # The group has assigned the partition to another member, which reads these messages
                # again.
                log.info("offset_not_stored", partition=partition, error=str(error))

    def _lag(self) -> int:
        assert self._consumer is not None
        partitions = self._consumer.assignment()
        lag = 0
        for position in self._consumer.position(partitions) if partitions else []:
            watermarks = self._consumer.get_watermark_offsets(position, cached=True)
            if watermarks[1] >= 0 and position.offset >= 0:
                lag += max(0, watermarks[1] - position.offset)
        return lag

    def _is_drained(self) -> bool:
        assert self._consumer is not None
        partitions = self._consumer.assignment()
        if not self.is_assigned or not partitions:
            return self.is_assigned
        positions = self._consumer.position(partitions)
        committed = self._consumer.committed(partitions, timeout=_METADATA_S)
        for position, kept in zip(positions, committed, strict=True):
            # The end offset of the last fetch is used, because a request for the present one would
            # wait for the fetch in progress.
            _, high = self._consumer.get_watermark_offsets(position, cached=True)
            # A negative end offset means that nothing was fetched yet.
            if high < 0 or (high > 0 and max(position.offset, kept.offset) < high):
                return False
        return True

    def _close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.is_assigned = True
        committed = consumer.committed(partitions, timeout=_METADATA_S) if partitions else []
        self._offsets.assign({one.partition: one.offset for one in committed})
        log.info("partitions_assigned", partitions=len(partitions))

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._is_lost = True
        log.warning("partitions_lost", partitions=len(partitions))


def group_in_cluster(group: str, cluster_id: str | None) -> str:
    """Return the name of the consumer group for one Kafka cluster."""
    return f"{group}.{cluster_id}"
