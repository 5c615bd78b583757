"""Metrics of the quality guard."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge


class QualityMetrics:
    """Counts the outcomes of golden prompts, and of the judgements on them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._quarantines = Counter(
            "control_plane_quarantines_total",
            "Replicas that were put in quarantine because they answer golden prompts otherwise",
            registry=registry,
        )
        self._alerts = Gauge(
            "control_plane_quality_alerts_count",
            "Pools and prompts whose answers need an operator, by why; tenant: at a prompt of"
            " a tenant, which decides about no replica",
            ["alert"],
            registry=registry,
        )
        self._deviations = Counter(
            "control_plane_quality_deviations_total",
            "Answers to golden prompts that are not what they should be, by what they differ in",
            ["difference"],
            registry=registry,
        )
        self._held = Counter(
            "control_plane_quarantines_held_total",
            "Quarantined replicas that are not replaced at once because of the hourly budget of"
            " their pool, or the daily one of their node",
            ["budget"],
            registry=registry,
        )
        self._failures = Counter(
            "control_plane_quality_failures_total",
            "Pools and prompts whose answers could not be judged, each time",
            registry=registry,
        )

        self._dropped = Counter(
            "control_plane_quality_answers_dropped_total",
            "Answers to golden prompts that cannot be kept, by why; id: a replica or node with an"
            " impossible one, refused: the database would not take it",
            ["reason"],
            registry=registry,
        )

    def count_deviations(self, difference: str, count: int) -> None:
        """Count answers that deviate, by kind of difference."""
        self._deviations.labels(difference).inc(count)

    def count_quarantines(self, count: int) -> None:
        """Count replicas that were quarantined."""
        self._quarantines.inc(count)

    def count_held(self, budget: str) -> None:
        """Count a quarantined replica that is not replaced because of a budget."""
        self._held.labels(budget).inc()

    def count_failure(self) -> None:
        """Count a group (pool and prompt) that could not be judged."""
        self._failures.inc()

    def count_dropped(self, reason: str) -> None:
        """Count an answer that could not be stored."""
        self._dropped.labels(reason).inc()

    def show_quality(self, alerts: Mapping[str, int]) -> None:
        """Set the number of open alerts by kind."""
        for alert, count in alerts.items():
            self._alerts.labels(alert).set(count)
