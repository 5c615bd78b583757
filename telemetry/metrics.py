"""Defines all metrics of the telemetry service. A test checks their names."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sluice.certificate_metric import CertificateExpiry
from telemetry.judged_quality import JudgedRelease
from telemetry.rollups import Level
from telemetry.rows import PoisonReason

_OF_EVENTS = {
    "duplicates": "telemetry_events_duplicate",
    "poisoned": "telemetry_messages_poisoned",
    "forged": "telemetry_messages_forged",
    "missing": "telemetry_messages_missing",
    "write_failures": "telemetry_write_failures",
    "session_failures": "telemetry_session_failures",
    "write_seconds": "telemetry_write_seconds",
    "lag": "telemetry_lag_events",
    "is_ready": "telemetry_ready",
}
_OF_TEXTS = {
    "duplicates": "telemetry_texts_duplicate",
    "poisoned": "telemetry_text_messages_poisoned",
    "forged": "telemetry_text_messages_forged",
    "missing": "telemetry_text_messages_missing",
    "write_failures": "telemetry_text_write_failures",
    "session_failures": "telemetry_text_session_failures",
    "write_seconds": "telemetry_text_write_seconds",
    "lag": "telemetry_text_lag_events",
    "is_ready": "telemetry_text_ready",
}


class SinkMetrics:
    """Metrics of one sink.

    Events and texts have separate metrics, because the loss of a text is not a loss of usage.

    Attributes:
        lag: Number of unread messages.
        is_ready: 1 while the broker and ClickHouse can be reached, else 0.
    """

    def __init__(self, registry: CollectorRegistry, names: Mapping[str, str], of: str) -> None:
        """Register metrics under `names`. Their descriptions begin with `of`."""
        counter = partial(Counter, registry=registry)
        self.duplicates = counter(
            names["duplicates"],
            f"{of}Messages left out because their event id came before in the same batch.",
        )
        self.poisoned = counter(
            names["poisoned"], f"{of}Messages parked in the table poison.", ["reason"]
        )
        for reason in PoisonReason:
            self.poisoned.labels(reason=reason)
        self.forged = counter(
            names["forged"],
            f"{of}Messages dropped because no process of this installation made them.",
        )
        self.missing = counter(
            names["missing"], f"{of}Messages that the broker deleted before they were read."
        )
        self.write_failures = counter(
            names["write_failures"], f"{of}Inserts that failed and are retried."
        )
        self.session_failures = counter(
            names["session_failures"],
            f"{of}Times that broker or ClickHouse could not be reached and everything began anew.",
        )
        self.write_seconds = Histogram(
            names["write_seconds"],
            f"{of}Duration of successful inserts.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.lag = Gauge(names["lag"], f"{of}Messages still to be read.", registry=registry)
        self.is_ready = Gauge(
            names["is_ready"], f"{of}1 while broker and ClickHouse are reached.", registry=registry
        )


class TelemetryMetrics:
    """The metrics of the telemetry service, in a registry of this object."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(CertificateExpiry())
        counter = partial(Counter, registry=self.registry)
        self.events_written = counter(
            "telemetry_events_written", "Events acknowledged by ClickHouse."
        )
        self.closings = counter(
            "telemetry_closings_written", "Closings of routers acknowledged by ClickHouse."
        )
        self.gateway_lost = counter(
            "telemetry_requests_closed",
            "Requests whose gateway was killed: rows made of what routers told of them.",
        )
        self.texts = counter(
            "telemetry_texts_written", "Redacted texts of requests acknowledged by ClickHouse."
        )
        self.text_erasure_age = Gauge(
            "telemetry_text_erasure_age_seconds",
            "For how long there have been rows of erased texts that are not deleted. 0: none are.",
            registry=self.registry,
        )
        self.spans_exported = counter(
            "telemetry_spans_exported", "Spans that the OpenTelemetry collector has taken."
        )
        self.spans_dropped = counter(
            "telemetry_spans_dropped",
            "Requests whose spans were not exported: full (the collector is too slow), refused or"
            " late (it is away), stopped (the service ended before).",
            ["reason"],
        )
        for reason in ("full", "refused", "late", "stopped"):
            self.spans_dropped.labels(reason=reason)
        self.of_events = SinkMetrics(self.registry, _OF_EVENTS, "")
        self.of_texts = SinkMetrics(self.registry, _OF_TEXTS, "Redacted texts: ")
        self._of_ledger()

    def _of_ledger(self) -> None:
        self.ingested_until = Gauge(
            "telemetry_ingested_until_seconds",
            "Unix time; what gateways sent before it is in ClickHouse. 0: not known yet.",
            registry=self.registry,
        )
        self.replica_price = Gauge(
            "llm_replica_hour_price",
            "Of an hour of one replica, by the price list; no series without one.",
            ["pool", "currency"],
            registry=self.registry,
        )
        self.mismatch = Gauge(
            "llm_ledger_mismatch_tokens",
            "Output tokens by which ledger and engines differ, in closed hours of two days.",
            registry=self.registry,
        )
        self.compared_at = Gauge(
            "telemetry_ledger_compared_seconds",
            "Unix time at which ledger and engines were last compared. 0: not yet.",
            registry=self.registry,
        )
        self.rollup_marks = Counter(
            "telemetry_rollup_marks",
            "Minutes of tenants that were summed because events came.",
            ["level"],
            registry=self.registry,
        )
        self.rolled_up = Gauge(
            "telemetry_rolled_up_seconds",
            "Unix time; what was written before it is in the rollups. 0: not known yet.",
            ["level"],
            registry=self.registry,
        )
        for level in Level:
            self.rollup_marks.labels(level=level)
            self.rolled_up.labels(level=level)
        self._define_models()

    def _define_models(self) -> None:
        of_model = partial(Gauge, labelnames=["model"], registry=self.registry)
        self.model_ttft_s = of_model(
            "llm_model_ttft_p99_seconds",
            "99th percentile of TTFT in the last five minutes, of the 20 busiest models.",
        )
        self.model_goodput = of_model(
            "llm_model_goodput_ratio",
            "Share of requests that met the default objectives in the last five minutes, of the 20"
            " busiest models.",
        )
        self.model_requests = of_model(
            "llm_model_requests_count",
            "Requests of the last five minutes, of the 20 busiest models.",
        )
        of_release = partial(Gauge, labelnames=["model", "release"], registry=self.registry)
        self.release_good = of_release(
            "llm_release_judged_good_ratio",
            "Share of good ones among the judged answers of auto to requests of the last day.",
        )
        self.release_judged = of_release(
            "llm_release_judged_count", "Judged answers of auto to requests of the last day."
        )
        self.release_drop = of_release(
            "llm_release_judged_drop_ratio",
            "Points by which the share of good answers is below that of the model in the 14 days"
            " before; 0 where that may be chance.",
        )

    def show_judged(self, releases: Sequence[JudgedRelease]) -> None:
        """Set the judged quality of these releases, and remove the values of all other releases."""
        for gauge in (self.release_good, self.release_judged, self.release_drop):
            gauge.clear()
        for it in releases:
            self.release_good.labels(it.model, it.release).set(it.good)
            self.release_judged.labels(it.model, it.release).set(it.judged)
            self.release_drop.labels(it.model, it.release).set(it.drop)

    def show_models(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Set these service levels from `telemetry.slo`, and remove those of other models."""
        for gauge in (self.model_ttft_s, self.model_goodput, self.model_requests):
            gauge.clear()
        for it in models:
            self.model_requests.labels(it["model"]).set(it["requests"])
            if it["ttft_ms"][-1] is not None:
                self.model_ttft_s.labels(it["model"]).set(it["ttft_ms"][-1] / 1000)
            if it["goodput"] is not None:
                self.model_goodput.labels(it["model"]).set(it["goodput"])

    def show_prices(self, prices: Mapping[str, float], currency: str) -> None:
        """Set the price of one replica-hour of each pool."""
        for pool_id, price in prices.items():
            self.replica_price.labels(pool_id, currency).set(price)
