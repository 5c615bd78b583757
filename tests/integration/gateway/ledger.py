"""Reads the events of requests from a broker, as telemetry would."""

from confluent_kafka import Consumer

from sluice.events import REQUESTS_TOPIC
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent


class Ledger:
    """What the broker holds, under the precedence that telemetry has."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.told: dict[str, RequestEvent] = {}
        self.closings: dict[str, dict[int, RequestEvent]] = {}
        self.counts: dict[str, RequestEvent] = {}
        self.reads = 0

    def read_until(self, ids: set[str], *, has_last_word: bool = False, told: int = 0) -> None:
        """Read all until these are told of, and the router has ended, and a little longer.

        Args:
            ids: Events.
            has_last_word: Whether the router has ended.
            told: So many events of gateways are there, whatever their ids.
        """
        for found in (self.told, self.closings, self.counts):
            found.clear()
        self.reads += 1
        group = {"group.id": f"ledger-{self.reads}", "auto.offset.reset": "earliest"}
        consumer = Consumer({"bootstrap.servers": self.address, **group})
        consumer.subscribe([REQUESTS_TOPIC])
        idle = 0
        try:
            for _ in range(1200):
                message = consumer.poll(0.1)
                idle = 0 if message is not None else idle + 1
                if message is not None and message.error() is None:
                    self._take(RequestEvent.FromString(message.value()))
                is_told = ids <= self.told.keys() | self.closings.keys()
                is_over = any(event.count.is_last for event in self.counts.values())
                is_told = is_told and len(self.told) >= told
                if idle > 10 and is_told and is_over >= has_last_word:
                    return
        finally:
            consumer.close()
        missing = ids - self.told.keys() - self.closings.keys()
        raise AssertionError(f"nobody tells of {missing or 'the end of the router'}")

    def _take(self, event: RequestEvent) -> None:
        if event.schema_version == 1:
            assert event.event_id not in self.told
            self.told[event.event_id] = event
            return
        if event.schema_version == 3:
            known = self.counts.get(event.event_id)
            if known is None or known.count.number < event.count.number:
                self.counts[event.event_id] = event
            return
        parts = self.closings.setdefault(event.event_id, {})
        known = parts.get(event.part)
        if known is None or known.output_tokens < event.output_tokens:
            parts[event.part] = event

    def tokens(self) -> dict[str, int]:
        """Return the output tokens of each request."""
        closed = {
            event_id: sum(event.output_tokens for event in parts.values())
            for event_id, parts in self.closings.items()
        }
        return closed | {event_id: event.output_tokens for event_id, event in self.told.items()}
