"""Every metric of the service, in one place; a test holds their names."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from telemetry.rows import PoisonReason


class Metrics:
    """The metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.events_written = Counter(
            "telemetry_events_written", "Events acknowledged by ClickHouse.", registry=self.registry
        )
        self.duplicates = Counter(
            "telemetry_events_duplicate",
            "Messages left out because their event id came before in the same batch.",
            registry=self.registry,
        )
        self.poisoned = Counter(
            "telemetry_messages_poisoned",
            "Messages parked in the table poison.",
            ["reason"],
            registry=self.registry,
        )
        for reason in PoisonReason:
            self.poisoned.labels(reason=reason)
        self.missing = Counter(
            "telemetry_messages_missing",
            "Messages that the broker deleted before they were read.",
            registry=self.registry,
        )
        self.write_failures = Counter(
            "telemetry_write_failures",
            "Inserts that failed and are retried.",
            registry=self.registry,
        )
        self.session_failures = Counter(
            "telemetry_session_failures",
            "Times that broker or ClickHouse could not be reached and everything began anew.",
            registry=self.registry,
        )
        self.write_seconds = Histogram(
            "telemetry_write_seconds",
            "Duration of successful inserts.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self.registry,
        )
        self.lag = Gauge(
            "telemetry_lag_events", "Messages still to be read.", registry=self.registry
        )
        self.ingested_until = Gauge(
            "telemetry_ingested_until_seconds",
            "Unix time; what gateways sent before it is in ClickHouse. 0: not known yet.",
            registry=self.registry,
        )
        self.is_ready = Gauge(
            "telemetry_ready", "1 while broker and ClickHouse are reached.", registry=self.registry
        )
