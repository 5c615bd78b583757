"""All metrics of the router, in a separate registry. All labels have a bounded set of values."""

from collections import Counter as Counts
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.core.fleet.health import HealthState
from router.core.router import RouterCore
from router.core.types.actions import Stats
from sluice.certificate_metric import CertificateExpiry
from sluice.priority import CLASSES

# Edges at the objectives of interactive (0.3 s) and ordinary (1.5 s) tiers.
_TTFT_EDGES_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 3.0, 6.0, 15.0, 30.0)


class RouterMetrics:
    """The router's counters and gauges. `take` adds the core's totals to the counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(CertificateExpiry())
        counter = partial(Counter, registry=self.registry)
        self.outcomes = counter("router_outcomes", "Requests by how they ended", ["kind", "code"])
        self.tokens = counter("router_tokens", "Output tokens forwarded")
        self.requeues = counter("router_requeues", "Dispatches that came back to the queue")
        self.preemptions = counter("router_preemptions", "Running requests that were interrupted")
        self.ejections = counter(
            "router_ejections", "Replicas that were taken out of service, by reason", ["reason"]
        )
        self.transfers = counter(
            "router_transfers",
            "Transfers of KV blocks for split requests: complete, partial, failed or abandoned",
            ["result"],
        )
        self.prompt_tokens = counter("router_prompt_tokens", "Prompt tokens placed on replicas")
        self.cached_tokens = counter(
            "router_cached_tokens", "Prompt tokens of those that engines had cached"
        )
        self.stray_tokens = counter("router_stray_tokens", "Tokens of unknown sequences")
        self.count_mismatches = counter(
            "router_count_mismatches", "Sequences whose tokens engine and router count differently"
        )
        self.frames = counter("router_frames", "Step frames received")
        self.replicas_lost = counter("router_replicas_lost", "Attachments that ended unasked")
        self.streams_resumed = counter(
            "router_streams_resumed", "Broken streams to replicas that went on without a loss"
        )
        self.gateways_cut = counter("router_gateways_cut", "Gateways that read too slowly")
        self.closings = counter(
            "router_closings", "Requests of lost gateways whose account was closed here"
        )
        self.closings_dropped = counter(
            "router_closings_dropped", "Of these, forgotten because no gateway came to tell them"
        )
        histogram = partial(Histogram, buckets=_TTFT_EDGES_S, registry=self.registry)
        self.ttft_s = histogram("router_ttft_seconds", "Arrival at the router to first token")
        self.ttft_predicted_s = counter(
            "router_ttft_predicted_seconds",
            "Predicted at their admission for the requests of router_ttft_seconds, summed",
        )
        self.queue_s = histogram("router_queue_seconds", "Arrival at the router to dispatch")
        self._pool_of: Callable[[str], str] = str
        self._define_gauges()

    def _define_gauges(self) -> None:
        self._health = Gauge(
            "router_replicas",
            "Attached replicas, by health",
            ["health"],
            registry=self.registry,
        )
        self._depth = Gauge(
            "llm_queue_depth",
            "Waiting requests by pool and by the priority of their tier",
            ["pool", "priority"],
            registry=self.registry,
        )
        self._control_age_s = Gauge(
            "router_control_age_seconds", "Age of the control state", registry=self.registry
        )
        self._peers_age_s = Gauge(
            "router_pool_service_age_seconds",
            "Age of what the router that is silent for longest told of the service of tenants in"
            " its cells of our pools; 0: there is no other router",
            registry=self.registry,
        )
        gauges = {
            "queued": ("router_queue_requests", "Waiting requests"),
            "queued_tokens": ("router_queue_tokens", "Prompt tokens of waiting requests"),
            "running": ("router_running_requests", "Sequences booked on replicas"),
            "replicas": ("router_replicas_ready", "Replicas that take requests"),
            "cells": ("router_cells", "Cells owned"),
            "gateways": ("router_gateways", "Connected gateways"),
        }
        self._gauges = {
            key: Gauge(name, text, registry=self.registry) for key, (name, text) in gauges.items()
        }

    def follow(self, control_age_s: Callable[[], float], pool_of: Callable[[str], str]) -> None:
        """Set the functions, called per scrape, for the control state's age and a cell's pool."""
        self._control_age_s.set_function(control_age_s)
        self._pool_of = pool_of

    def follow_peers(self, age_s: Callable[[], float]) -> None:
        """Set the function that returns the age of other routers' reports at each scrape."""
        self._peers_age_s.set_function(age_s)

    def take(self, stats: Stats) -> None:
        """Add the core's totals and samples since the last call."""
        for (kind, code), number in stats.outcomes.items():
            self.outcomes.labels(kind=kind, code=code).inc(number)
        self.tokens.inc(stats.tokens)
        self.requeues.inc(stats.requeues)
        self.preemptions.inc(stats.preemptions)
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.cached_tokens.inc(stats.cached_tokens)
        self.ttft_predicted_s.inc(stats.ttft_predicted_s)
        for result, number in stats.transfers.items():
            self.transfers.labels(result=result).inc(number)
        for reason, number in stats.ejections.items():
            self.ejections.labels(reason=reason).inc(number)
        self.stray_tokens.inc(stats.stray_tokens)
        self.count_mismatches.inc(stats.count_mismatches)
        for value in stats.ttft_s:
            self.ttft_s.observe(value)
        for value in stats.queue_times_s:
            self.queue_s.observe(value)

    def exposition(self, core: RouterCore) -> bytes:
        """Return the metrics in Prometheus' text format."""
        cells = [cell for cell in core.cells.values() if cell.is_owned]
        values = {
            "queued": sum(cell.queue.requests for cell in cells),
            "queued_tokens": sum(cell.queue.tokens for cell in cells),
            "running": sum(len(book.dispatches) for book in core.replicas.values()),
            "replicas": sum(len(cell.fleet.ready()) for cell in cells),
            "cells": len(cells),
            "gateways": len(core.gateways),
        }
        for key, value in values.items():
            self._gauges[key].set(value)
        self._depth.clear()  # drops tiers and pools that no longer exist
        for cell in cells:
            for priority, requests in cell.queue.depths():
                depth = self._depth.labels(self._pool_of(cell.cell_id), str(priority // CLASSES))
                depth.inc(requests)
        health = Counts(
            core.cells[book.cell_id].fleet.health.state(book.replica_id)
            for book in core.replicas.values()
            if book.limits is not None
        )
        for state in HealthState:
            self._health.labels(health=state.name.lower()).set(health[state])
        return generate_latest(self.registry)
