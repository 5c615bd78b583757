"""Ships events to the broker without ever making a request wait.

`emit` appends to a bounded queue in memory; one owned thread does the rest. While the broker
answers, events go straight to it. Once it has been away for `broker_wait_s`, or the client's own
queue is full, all events go to the disk spool instead, and the thread replays the spool in order
until it is empty; only then do events go straight again. Every lost event is counted.

Delivery is at least once (a replayed batch may have arrived before): consumers deduplicate by
`event_id`. A crash of the process loses events in memory only: the last `_TICK_S` of them, and
those that the broker has not acknowledged within `broker_wait_s`. Routers report these instead.
After the loss of a router, `put_on_disk` spools events that the broker does not take at once.
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

# Brokers refuse messages above 1 MB by default; one that is always refused would block the spool.
EVENT_MAX_BYTES = 900_000
_TICK_S = 0.05  # how long an event may lie in memory before the thread sees it
_CHUNK = 256  # events per step of the thread, so that it never holds the interpreter for long
_REPLAY_BATCH = 1_000
_RETRY_PAUSE_S = 0.5
# Seconds that the broker may take before events go to disk, from where they are sent again.
_ACKNOWLEDGED_S = 0.2
_PURGE_S = 5.0  # purging is local and takes microseconds; a client stuck longer is given up


@dataclass(frozen=True, slots=True)
class EventStats:
    """Counters since the start, and two gauges.

    Attributes:
        emitted: Calls of `emit`.
        delivered: Events acknowledged by the broker, replayed ones included.
        delivery_failures: Attempts that the broker did not acknowledge; the events were spooled.
        spooled: Events written to the disk spool.
        dropped: Lost events: no room in memory or on disk, too large, or no spool configured.
        damaged: Records of the spool that could not be read back.
        queued: Events in memory now; a gauge.
        spool_bytes: Bytes on disk now; a gauge.
        evicted: Records of the lesser spool that were deleted for these, because the disk was full.
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
        # Successes are what was produced and neither failed nor is queued; no call for each.
        "delivery.report.only.error": True,
        "log_level": 0,
        **security(),
    }


class EventProducer:
    """Sends serialised messages to one topic. Owns a thread from construction until `close`.

    Construct it after any fork; call `emit` from one thread only.
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
        """Start shipping; the broker need not run yet.

        Args:
            bootstrap: `host:port,...` of the brokers.
            topic: Topic of all events.
            spool_directory: Root of the disk spool; several processes may share it. None: events
                that cannot be delivered are dropped and counted.
            spool_max_bytes: Bound of the spool; above it the oldest events are dropped and counted.
            spool_segment_bytes: Bytes of a spool file, and the most that a crash delivers twice.
            lesser_spool: Root of a spool of lesser events, deleted first on a full disk.
            queue_max: Events in memory, and the same number again inside the client.
            broker_wait_s: Seconds that the broker may be away before events go to disk.
            linger_ms: Milliseconds that the client waits to fill a batch.
            may_spool: Whether these events may use the disk; if not, spooled ones are dropped.
            is_over: Returns whether an event from the spool has expired: then it is not sent.

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
        self._disk_wanted = False  # by the thread of the caller
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
        self._thread = threading.Thread(target=self._run, name=f"events-{topic}", daemon=True)
        self._thread.start()

    def emit(self, payload: bytes) -> None:
        """Queue one event; never blocks and never raises for lack of room or broker."""
        if len(self._queue) >= self._queue_max or len(payload) > EVENT_MAX_BYTES:
            self._queue_drops += 1
        else:
            self._queue.append(payload)
        self._emitted += 1

    def put_on_disk(self) -> None:
        """Spool events at once from now on instead of keeping them in memory; never blocks.

        To be called when no other process could report them if this one were killed. They may
        arrive twice.
        """
        self._disk_wanted = True

    @property
    def stats(self) -> EventStats:
        """A snapshot; consistent enough for metrics."""
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
        """Whether the disk is short of room for these events."""
        return self._spool is not None and self._spool.is_tight

    def flush(self, timeout_s: float) -> bool:
        """Wait until all events emitted before are at the broker; blocks, so call it in a thread.

        Returns:
            False when time ran out first; the events go on being shipped.
        """
        wanted = self._emitted
        with self._settled:
            return self._settled.wait_for(
                lambda: self._settled_emitted >= wanted or not self._thread.is_alive(), timeout_s
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush, put what is left into the spool (or count it as dropped), end the thread."""
        if self._thread.is_alive():
            self.flush(timeout_s)
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception:
                # No task awaits this thread: without the catch every later event would be lost.
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
        # Also the pause: returns early only when there is a failure to report.
        self._producer.poll(0.0 if len(self._queue) > _CHUNK else _TICK_S)

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
        """Return whether events in memory have to be spooled now."""
        if self._disk_wanted:
            self._disk_wanted, self._disk_at = False, self._disk_at or now + _ACKNOWLEDGED_S
        if self._disk_at is None or now < self._disk_at:
            return False
        self._disk_at = None
        return self._spool is not None

    def _may_wait(self) -> bool:
        """Whether the queue can stay in memory until the spool is empty.

        Otherwise events that come during the replay would be spooled as well, and so on: under
        steady load the spool would never be empty.
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
        """Send the oldest spooled events; forget them only when every one is acknowledged."""
        assert self._spool is not None
        if self._replaying and not self._failed:
            if len(self._producer):
                return
            self._spool.advance()
        elif self._failed:
            self._reset()
            self._failed.clear()  # still in the spool
            self._retry_at = now + _RETRY_PAUSE_S
        was_delivered = self._replaying > 0
        self._replaying = 0
        if now < self._retry_at:
            return
        # One event is enough to ask whether the broker is back.
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
        """Take back all unacknowledged events, oldest first, and use the spool from now on."""
        self._reset()
        failed, self._failed = self._failed, []
        self._keep(failed)
        if self._spool is not None:
            self._is_direct = False
            log.warning("events_spooled", topic=self._topic, events=len(failed))

    def _reset(self) -> None:
        """Begin anew with a fresh client, without the old one's fatal error or lost sequence."""
        self._purge()
        self._producer = Producer(self._config)

    def _purge(self) -> None:
        """Make the client report everything unacknowledged as failed."""
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
