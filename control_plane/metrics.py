"""All metrics of the control plane."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from control_plane.watch.feed import Feed
from sluice.watch import KINDS


class Metrics:
    """Counts what happens, and looks at the feed when it is asked."""

    content_type = "text/plain; version=0.0.4"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._watchers = Gauge(
            "control_plane_watchers_count",
            "Open watches",
            ["role"],
            registry=self.registry,
        )
        self._requests = Counter(
            "control_plane_requests_total",
            "Admin requests by route and status",
            ["route", "status"],
            registry=self.registry,
        )
        self._objects = Gauge(
            "control_plane_objects_count", "Objects in the state", ["kind"], registry=self.registry
        )
        self._version = Gauge(
            "control_plane_state_version", "Version of the state", registry=self.registry
        )
        self._database_up = Gauge(
            "control_plane_database_up", "1 while PostgreSQL is heard", registry=self.registry
        )
        self._refresh_s = Gauge(
            "control_plane_refresh_seconds",
            "How long the last reading of changes took",
            registry=self.registry,
        )

    def count_watcher(self, role: str, change: int) -> None:
        """Count a watcher that came (+1) or left (-1)."""
        self._watchers.labels(role).inc(change)

    def count_request(self, route: str, status: int) -> None:
        """Count an answered admin request; `route` is the pattern, not the path."""
        self._requests.labels(route, str(status)).inc()

    def render(self, feed: Feed) -> bytes:
        """Return everything in Prometheus' text format; the gauges say what the feed holds now."""
        state = feed.state
        for kind in KINDS:
            self._objects.labels(kind).set(len(state.of_kind(kind)))
        self._version.set(state.version)
        self._database_up.set(feed.is_database_up)
        self._refresh_s.set(feed.refresh_s)
        return generate_latest(self.registry)
