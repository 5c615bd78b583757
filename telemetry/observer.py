"""Tracks how far the consumer group has written, and thus up to which time events are ingested.

This process is one member of the group, and each member reads some of the partitions. The offsets
of all partitions are read from the broker by a client that does not join the group.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import structlog
from confluent_kafka import Consumer, KafkaException, TopicPartition

from sluice.kafka import security
from sluice.lifecycle import run_every
from telemetry.consumer import group_in_cluster
from telemetry.metrics import TelemetryMetrics
from telemetry.progress import IngestProgress

log = structlog.get_logger(__name__)

_EVERY_S = 1.0
_CALL_S = 5.0
_STEP_S = 60.0


class SinkObserver:
    """Updates `progress` from the broker's offsets, in a dedicated thread.

    Attributes:
        progress: Progress of ingestion. It does not advance while the broker cannot be reached.
    """

    def __init__(
        self, bootstrap: str, topic: str, group: str, *, protocol: str, metrics: TelemetryMetrics
    ) -> None:
        self._topic = topic
        self._group = group
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="observer")
        self._client: Consumer | None = None
        self._client_group = ""
        self._config: dict[str, str | int | float | bool] = {
            "bootstrap.servers": bootstrap,
            "client.id": "sluice-telemetry-observer",
            "group.protocol": protocol,
            "enable.auto.commit": False,
            "allow.auto.create.topics": False,
            "reconnect.backoff.max.ms": 1000,
            "log_level": 2,
            **security(),
        }
        self.progress = IngestProgress()

    async def run(self) -> None:
        """Read the offsets once a second until cancelled."""
        try:
            await run_every(
                _EVERY_S,
                self._step,
                name="observer",
                expected=(KafkaException,),
                step_timeout_s=_STEP_S,
            )
        finally:
            self._thread.submit(self._leave)
            self._thread.shutdown(wait=False)

    async def _step(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._read_offsets)
        self._metrics.ingested_until.set(self.progress.until_ms / 1000)

    # The functions below run in the observer's thread.

    def _read_offsets(self) -> None:
        """Read the end of each partition and the group's offsets. Raises KafkaException."""
        if self._client is None:
            self._client = Consumer({**self._config, "group.id": f"{self._group}.probe"})
        known = self._client.list_topics(self._topic, timeout=_CALL_S)
        topic = known.topics[self._topic]
        if topic.error is not None:
            raise KafkaException(topic.error)
        group = group_in_cluster(self._group, known.cluster_id)
        if group != self._client_group:
            # This is the first cluster, or a new cluster has replaced the old one.
            self.progress.forget()
            self._leave()
            self._client = Consumer({**self._config, "group.id": group})
            self._client_group = group
        partitions = [TopicPartition(self._topic, number) for number in topic.partitions]
        now_ms = int(time.time() * 1000)
        bounds = {
            one.partition: self._client.get_watermark_offsets(one, timeout=_CALL_S, cached=False)
            for one in partitions
        }
        self.progress.mark(now_ms, {number: high for number, (_, high) in bounds.items()})
        written: dict[int, int] = {}
        for one in self._client.committed(partitions, timeout=_CALL_S):
            if one.error is not None:
                raise KafkaException(one.error)
            # The broker may have deleted messages before this offset. They count as written,
            # because otherwise the progress would stop.
            written[one.partition] = max(one.offset, bounds[one.partition][0])
        self.progress.written(written)

    def _leave(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
