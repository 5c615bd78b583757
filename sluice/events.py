"""Sends events to the broker without delaying requests.

`emit` appends an event to a bounded queue in memory, and a thread of the producer sends the events.
While the broker answers, events are sent directly. All events are written to the disk spool if the
broker has not answered for `broker_wait_s`, or the client's own queue is full. The thread then
sends the spool's events in order, and returns to direct sending when the spool is empty. Every lost
event is counted.

Delivery is at least once, because a replayed batch may have been delivered before. So consumers
deduplicate by `event_id`. A crash of the process loses only events in memory. These are the events
of the last `_TICK_S`, and the events that the broker had not acknowledged. Routers report these
events instead. After the loss of a router, `put_on_disk` spools all events that the broker does not
acknowledge within `_ACKNOWLEDGED_S`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from sluice.event_proof import proof
from sluice.kafka import security
from sluice.spool import Spool

log = structlog.get_logger(__name__)

REQUESTS_TOPIC = "sluice.requests.v1"
TEXTS_TOPIC = "sluice.texts.v1"

# Largest event. Brokers refuse messages above 1 MB by default, and an event that is always refused
# would block the spool.
EVENT_MAX_BYTES = 900_000
_TICK_S = 0.05  # longest delay in seconds until the thread processes a new event
_REST_S = 1.0  # longest pause in seconds of a thread without events, which the next event ends
_CHUNK = 256  # events per step of the thread, which bounds how long it occupies the interpreter
_REPLAY_BATCH = 1_000
_RETRY_PAUSE_S = 0.5
# Seconds without an acknowledgement until events are spooled, after a call of `put_on_disk`.
_ACKNOWLEDGED_S = 0.2
_PURGE_S = 5.0  # longest purge, which is local and lasts microseconds unless the client hangs


@dataclass(frozen=True, slots=True)
class EventStats:
    """Counters since the start of the producer, and the gauges `queued` and `spool_bytes`.

    Attributes:
        emitted: Number of calls of `emit`.
        delivered: Events that the broker acknowledged, including replayed events.
        delivery_failures: Attempts that the broker did not acknowledge, whose events were spooled.
        spooled: Events written to the disk spool.
        dropped: Events lost for lack of memory, disk or a spool, or because of their size.
        damaged: Records of the spool that could not be read back.
        queued: Events in memory now.
        spool_bytes: Bytes of the spool on disk now.
        evicted: Records of `lesser_spool` that were deleted to make room on a full disk.
    """

    emitted: int
    delivered: int
    delivery_failures: int
    spooled: int
    dropped: int
    damaged: int
    queued: int
    spool_bytes: int
    evicted: int


def _client_config(
    bootstrap: str, queue_max: int, broker_wait_s: float, linger_ms: int
) -> dict[str, object]:
    return {
        "bootstrap.servers": bootstrap,
        "client.id": "sluice-events",
        "enable.idempotence": True,
        "compression.type": "lz4",
        "linger.ms": linger_ms,
        "queue.buffering.max.messages": queue_max,
        "queue.buffering.max.kbytes": 64 << 10,
        "message.timeout.ms": int(broker_wait_s * 1000),
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1000,
        # Successes are computed from the other counters, which saves a callback per event.
        "delivery.report.only.error": True,
        "log_level": 0,
        **security(),
    }


class EventProducer:
    """Sends serialized messages to one topic, by a thread that runs until `close`.

    A producer must be constructed after any fork, and `emit` must be called from one thread only.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        spool_directory: Path | None = None,
        spool_max_bytes: int = 1 << 30,
        spool_segment_bytes: int = 4 << 20,
        lesser_spool: Path | None = None,
        queue_max: int = 100_000,
        broker_wait_s: float = 5.0,
        linger_ms: int = 20,
        may_spool: Callable[[], bool] = lambda: True,
        is_over: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        """Start the thread, even while the broker is down.

        Args:
            bootstrap: `host:port,...` of the brokers.
            topic: Topic of all events.
            spool_directory: Root of the disk spool, which several processes may share. With None,
                undeliverable events are dropped and counted.
            spool_max_bytes: Largest size of the spool, above which the oldest events are dropped.
            spool_segment_bytes: Size of a spool file. After a crash, at most one file is sent
                again.
            lesser_spool: Root of a spool of less important events, deleted first on a full disk.
            queue_max: Most events in the queue, and in the client's own queue.
            broker_wait_s: Seconds without an acknowledgement until events are spooled.
            linger_ms: Milliseconds that the client waits to fill a batch.
            may_spool: Returns whether these events may be spooled. If not, the spool is emptied.
            is_over: Returns whether a spooled event has expired and must not be sent.

        Raises:
            OSError: The spool directory cannot be written.
        """
        self._topic, self._queue_max = topic, queue_max
        self._may_spool, self._is_over = may_spool, is_over
        self._config = _client_config(bootstrap, queue_max, broker_wait_s, linger_ms)
        self._config["on_delivery"] = self._on_failure
        self._queue: deque[bytes] = deque()
        self._emitted = self._queue_drops = 0
        self._produced = self._failures = self._spooled = self._unspooled = 0
        self._failed: list[bytes] = []
        self._replaying, self._retry_at = 0, 0.0
        self._disk_wanted = False  # set by the caller's thread
        self._disk_at: float | None = None
        self._spool = spool_directory and Spool(
            spool_directory,
            max_bytes=spool_max_bytes,
            segment_bytes=spool_segment_bytes,
            lesser=lesser_spool,
        )
        self._is_direct = self._spool is None or self._spool.is_empty
        self._producer = Producer(self._config)
        self._stop, self._settled = threading.Event(), threading.Condition()
        self._settled_emitted = 0
        self._woken, self._is_resting = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=f"events-{topic}", daemon=True)
        self._thread.start()

    def emit(self, payload: bytes) -> None:
        """Queue one event, or count it as dropped if the queue is full. Never blocks or raises."""
        if len(self._queue) >= self._queue_max or len(payload) > EVENT_MAX_BYTES:
            self._queue_drops += 1
        else:
            self._queue.append(payload)
        self._emitted += 1
        if self._is_resting:
            self._woken.set()

    def put_on_disk(self) -> None:
        """Spool all events that are still unacknowledged `_ACKNOWLEDGED_S` from now.

        Callers use this method while no router could report the events if this process were killed.
        Spooled events may be delivered twice. The call never blocks.
        """
        self._disk_wanted = True
        self._woken.set()

    @property
    def stats(self) -> EventStats:
        """Current values of the counters, read without a lock, for metrics only."""
        spool = self._spool
        in_client = len(self._producer)
        return EventStats(
            emitted=self._emitted,
            delivered=max(0, self._produced - self._failures - in_client),
            delivery_failures=self._failures,
            spooled=self._spooled,
            dropped=self._queue_drops + self._unspooled + (spool.dropped if spool else 0),
            damaged=spool.damaged if spool else 0,
            queued=len(self._queue) + in_client,
            spool_bytes=spool.size_bytes if spool else 0,
            evicted=spool.evicted if spool else 0,
        )

    @property
    def is_spool_tight(self) -> bool:
        """Whether the spool is more than half full, or the disk is full."""
        return self._spool is not None and self._spool.is_tight

    def flush(self, timeout_s: float) -> bool:
        """Block until the broker has acknowledged all events emitted so far.

        Returns:
            Whether all events were acknowledged within `timeout_s`. The thread continues to send
            afterwards.
        """
        wanted = self._emitted
        with self._settled:
            return self._settled.wait_for(
                lambda: self._settled_emitted >= wanted or not self._thread.is_alive(), timeout_s
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush, spool the remaining events or count them as dropped, and end the thread."""
        if self._thread.is_alive():
            self.flush(timeout_s)
            self._stop.set()
            self._woken.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception:
                # No task awaits this thread, so an uncaught error would lose every later event.
                log.exception("event_shipping_failed", topic=self._topic)
                self._stop.wait(_RETRY_PAUSE_S)
        self._purge()
        if self._is_direct:
            self._keep(self._failed)
        while self._queue:
            self._keep(self._take())
        if self._spool is not None:
            self._spool.close()

    def _turn(self) -> None:
        emitted = self._emitted
        self._step(time.monotonic())
        if not self._queue and len(self._producer) == 0 and self._is_direct:
            self._disk_at = None
            with self._settled:
                self._settled_emitted = emitted
                self._settled.notify_all()
            self._rest()
        # The poll is also the pause between turns. A delivery failure ends the poll early.
        self._producer.poll(0.0 if len(self._queue) > _CHUNK else _TICK_S)

    def _rest(self) -> None:
        """Wait for the next event, in a thread that has sent everything."""
        self._woken.clear()
        self._is_resting = True
        if not (self._queue or self._disk_wanted or self._stop.is_set()):
            self._woken.wait(_REST_S)
        self._is_resting = False

    def _step(self, now: float) -> None:
        if self._spool is not None and not self._spool.is_empty and not self._may_spool():
            self._reset()
            self._failed.clear()
            self._replaying = 0
            self._spool.clear()
        if (self._failed or self._is_disk_due(now)) and self._is_direct:
            self._fall_back()
        if self._is_direct:
            self._ship()
            return
        self._replay(now)
        if self._is_direct:
            self._ship()
            return
        while self._queue and not self._may_wait():
            self._keep(self._take())

    def _is_disk_due(self, now: float) -> bool:
        """Return whether all events in memory must be spooled now."""
        if self._disk_wanted:
            self._disk_wanted, self._disk_at = False, self._disk_at or now + _ACKNOWLEDGED_S
        if self._disk_at is None or now < self._disk_at:
            return False
        self._disk_at = None
        return self._spool is not None

    def _may_wait(self) -> bool:
        """Return whether new events can stay in memory because the replay of the spool ends soon.

        If all events that arrive during a replay were spooled, the spool would never be empty under
        a steady load.
        """
        assert self._spool is not None
        is_last = self._replaying > 0 and not self._failed and self._spool.is_all_peeked
        return is_last and len(self._queue) < self._queue_max // 2

    def _ship(self) -> None:
        taken = self._take()
        for index, payload in enumerate(taken):
            if not self._produce(payload):
                self._fall_back()
                self._keep(taken[index:])
                return

    def _replay(self, now: float) -> None:
        """Send the oldest spooled events, and delete them once all are acknowledged."""
        assert self._spool is not None
        if self._replaying and not self._failed:
            if len(self._producer):
                return
            self._spool.advance()
        elif self._failed:
            self._reset()
            self._failed.clear()  # the spool still contains the failed events
            self._retry_at = now + _RETRY_PAUSE_S
        was_delivered = self._replaying > 0
        self._replaying = 0
        if now < self._retry_at:
            return
        # After a failure, a single event tests whether the broker is reachable again.
        batch = self._spool.peek(_REPLAY_BATCH if was_delivered else 1)
        if not batch:
            self._is_direct = True
            log.info("event_spool_emptied", topic=self._topic)
            return
        for payload in batch:
            if not (self._is_over(payload) or self._produce(payload)):
                self._failed.append(payload)
                return
        self._replaying = len(batch)

    def _produce(self, payload: bytes) -> bool:
        try:
            self._producer.produce(self._topic, payload, headers=proof(self._topic, payload))
        except (BufferError, KafkaException):
            return False
        self._produced += 1
        return True

    def _fall_back(self) -> None:
        """Spool all unacknowledged events, oldest first, and use the spool from now on."""
        self._reset()
        failed, self._failed = self._failed, []
        self._keep(failed)
        if self._spool is not None:
            self._is_direct = False
            log.warning("events_spooled", topic=self._topic, events=len(failed))

    def _reset(self) -> None:
        """Replace the client, which may have a fatal error or a gap in its sequence numbers."""
        self._purge()
        self._producer = Producer(self._config)

    def _purge(self) -> None:
        """Force the client to report all unacknowledged events as failed."""
        self._producer.purge()
        deadline = time.monotonic() + _PURGE_S
        while len(self._producer) and time.monotonic() < deadline:
            self._producer.poll(_TICK_S)
        self._unspooled += len(self._producer)

    def _take(self) -> list[bytes]:
        return [self._queue.popleft() for _ in range(min(_CHUNK, len(self._queue)))]

    def _keep(self, payloads: list[bytes]) -> None:
        if self._spool is None or not self._may_spool():
            self._unspooled += len(payloads)
        else:
            self._spooled += self._spool.append(payloads)

    def _on_failure(self, _error: KafkaError, message: Message) -> None:
        self._failures += 1
        payload = message.value()
        if isinstance(payload, bytes):
            self._failed.append(payload)
