"""Definitions of all metrics of the control plane, and the methods that set them."""

from collections import Counter as Counts
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from control_plane.budgets.model import UNKNOWN, State
from control_plane.budgets.repository import NOTHING, Summary
from control_plane.quality.metrics import QualityMetrics
from control_plane.rollouts.state import UNREADABLE, Phase
from control_plane.scaling.model import Shown
from control_plane.scaling.nodes import NodesAsk
from control_plane.watch.feed import Feed
from sluice.certificate_metric import CertificateExpiry
from sluice.watch import KINDS
from sluice.wire.control.v1 import control_pb2 as wire

_STATE_PREFIX = "REPLICA_STATE_"


class ControlPlaneMetrics:
    """Holds the counters of events, and reads the state feed at each scrape."""

    content_type = "text/plain; version=0.0.4"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(CertificateExpiry())
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
        self._replicas = Gauge(
            "control_plane_replicas_count",
            "Replicas by pool and state; lost: the agent is silent",
            ["pool", "state"],
            registry=self.registry,
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
        self._unplaced = Gauge(
            "control_plane_replicas_unplaced_count",
            "Replicas that are wanted and find no place on any node; told by who leads the fleet",
            registry=self.registry,
        )
        self._replica_s = Counter(
            "llm_replica_seconds_total",
            "How long replicas had their places, running or reserved (starting, failed); of the"
            " control plane that leads, so sum them up. The record is `sluice fleet hours`",
            ["pool", "state"],
            registry=self.registry,
        )
        self._define_distribution()
        self._define_rollouts()
        self._define_budgets()
        self._define_scaling()
        self._define_rules()
        self.quality = QualityMetrics(self.registry)

    def _define_distribution(self) -> None:
        self._rounds = Histogram(
            "control_plane_distribution_round_seconds",
            "A round of planning who fetches which chunks from whom",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2.0),
            registry=self.registry,
        )
        self._orders = Counter(
            "control_plane_distribution_orders_total",
            "Orders to fetch chunks, by what they are fetched from: peer or store",
            ["source"],
            registry=self.registry,
        )
        self._chunk_failures = Counter(
            "control_plane_distribution_failures_total",
            "Chunks that agents asked for in vain, by whom they asked and why",
            ["source", "trouble"],
            registry=self.registry,
        )
        self._distribution_nodes = Gauge(
            "control_plane_distribution_nodes_count",
            "Agents that are told what to fetch",
            registry=self.registry,
        )

    def _define_rollouts(self) -> None:
        self._rollouts = Gauge(
            "control_plane_rollouts_count",
            "Rollouts that are not over, by phase; unreadable: this version cannot step them",
            ["phase"],
            registry=self.registry,
        )
        self._rollbacks = Counter(
            "control_plane_rollbacks_total",
            "Rollouts that the platform sent back, by the metric that was worse, or the reason",
            ["cause"],
            registry=self.registry,
        )
        self._notifications = Counter(
            "control_plane_alert_notifications_total",
            "Tries to tell a receiver of alerts: sent, failed (tried again), given_up",
            ["receiver", "result"],
            registry=self.registry,
        )
        self._evidence_age_s = Gauge(
            "control_plane_rollout_evidence_age_seconds",
            "Since the end of the last window of evidence, of the rollout that has the oldest",
            registry=self.registry,
        )

    def _define_budgets(self) -> None:
        self._budgets = Gauge(
            "control_plane_budgets_count",
            "Budgets of tenants by state; unknown: not compared with the ledger in their period."
            " Told by who leads",
            ["state"],
            registry=self.registry,
        )
        self._budgets_age_s = Gauge(
            "control_plane_budgets_age_seconds",
            "Since a budget was compared with the ledger, of the one that waits longest; 0 from"
            " those that do not lead",
            registry=self.registry,
        )
        self._budgets_recent = Gauge(
            "control_plane_budgets_recent_count",
            "Budgets that reached their state, or a higher soft percent, within the last hour."
            " Told by who leads",
            ["state"],
            registry=self.registry,
        )
        self.show_budgets(NOTHING)

    def _define_scaling(self) -> None:
        self._wanted = Gauge(
            "sluice_pool_replicas_wanted",
            "Replicas that scaling wants of a pool with bounds; told by who leads, for others that"
            " carry it out",
            ["pool"],
            registry=self.registry,
        )
        self._demand = Gauge(
            "sluice_pool_demand",
            "Demand of a pool with bounds: work-seconds per second, where one full replica does"
            " one. Told by who leads",
            ["pool"],
            registry=self.registry,
        )
        self._late_s = Gauge(
            "sluice_pool_replicas_late_seconds",
            "For how long replicas that scaling wants are late beyond the longest boot; 0: they"
            " are not. Told by who leads",
            ["pool"],
            registry=self.registry,
        )

        self._late = Counter(
            "sluice_pool_replicas_late_total",
            "Times that replicas of a pool began to be late beyond the longest boot: who carries"
            " the number out did nothing",
            ["pool"],
            registry=self.registry,
        )
        self._asks = Counter(
            "control_plane_node_asks_total",
            "Asks for nodes by actuator: kept (nothing to change), changed, failed",
            ["actuator", "result"],
            registry=self.registry,
        )
        self._nodes_wanted = Gauge(
            "control_plane_nodes_wanted_count",
            "Nodes that an actuator is asked for; told by who leads",
            ["actuator"],
            registry=self.registry,
        )
        self._nodes_missing = Gauge(
            "control_plane_nodes_missing_count",
            "Nodes that are asked for, and whose agents are not heard; told by who leads",
            ["actuator"],
            registry=self.registry,
        )

        self._moves = Counter(
            "control_plane_replica_moves_total",
            "Moves of replicas that empty a node: begun, done, given_up (the replacement was not"
            " ready in time), ended (by an operator or a rollout)",
            ["result"],
            registry=self.registry,
        )

    def count_move(self, result: str) -> None:
        """Count a move of a replica that has begun or ended."""
        self._moves.labels(result).inc()

    def count_late_pool(self, pool_id: str) -> None:
        """Count a pool whose actuator has just become late (`scaling.memory.without_effect_s`)."""
        self._late.labels(pool_id).inc()

    def count_ask(self, actuator: str, result: str) -> None:
        """Count a request for nodes to an actuator, by its result."""
        self._asks.labels(actuator, result).inc()

    def show_nodes(self, asks: Mapping[str, NodesAsk]) -> None:
        """Set the gauges of the requests for nodes to actuators.

        Only the control plane that leads sends requests. Other control planes have empty gauges.
        """
        for gauge in (self._nodes_wanted, self._nodes_missing):
            gauge.clear()
        for actuator, ask in asks.items():
            self._nodes_wanted.labels(actuator).set(ask.wanted)
            self._nodes_missing.labels(actuator).set(ask.missing)

    def _define_rules(self) -> None:
        self._rule_series = Gauge(
            "control_plane_rule_series_count",
            "Series that alert rules are evaluated on here; 0: a Prometheus does it",
            registry=self.registry,
        )
        self._rules_failed = Gauge(
            "control_plane_rules_failed_count",
            "Alert rules that had no result in the last round here",
            registry=self.registry,
        )

    def show_rules(self, series: int, failed: int) -> None:
        """Set the number of series and of failed rules in the last evaluation of alert rules."""
        self._rule_series.set(series)
        self._rules_failed.set(failed)

    def show_scaling(self, pools: Mapping[str, Shown]) -> None:
        """Set the gauges of each pool's replicas. A control plane that does not lead has none."""
        for gauge in (self._wanted, self._demand, self._late_s):
            gauge.clear()
        for pool_id, shown in pools.items():
            self._wanted.labels(pool_id).set(shown.wanted)
            self._demand.labels(pool_id).set(shown.demand)
            self._late_s.labels(pool_id).set(shown.late_s)

    def show_budgets(self, summary: Summary) -> None:
        """Set the gauges of budgets by state, and the age of the figures."""
        for state in (*State, UNKNOWN):
            self._budgets.labels(str(state)).set(summary.states.get(state, 0))
        for state in State:
            self._budgets_recent.labels(str(state)).set(summary.recent.get(state, 0))
        self._budgets_age_s.set(summary.age_s)

    def show_rollouts(self, phases: Mapping[str, int], evidence_age_s: float) -> None:
        """Set the numbers of live rollouts by phase, and the age of oldest evidence."""
        for phase in (*Phase, UNREADABLE):
            self._rollouts.labels(str(phase)).set(phases.get(phase, 0))
        self._evidence_age_s.set(evidence_age_s)

    def count_notification(self, receiver: str, result: str) -> None:
        """Count an attempt to send a notice to a receiver of alerts."""
        self._notifications.labels(receiver, result).inc()

    def count_rollback(self, cause: str) -> None:
        """Count a rollout that was rolled back."""
        self._rollbacks.labels(cause).inc()

    def count_round(self, took_s: float) -> None:
        """Count a round of the planner for artifact distribution, with its duration."""
        self._rounds.observe(took_s)

    def count_orders(self, of_peers: int, of_store: int) -> None:
        """Count new download orders from peers, and new download orders from the store."""
        self._orders.labels("peer").inc(of_peers)
        self._orders.labels("store").inc(of_store)

    def count_chunk_failure(self, source: str, trouble: str) -> None:
        """Count a chunk that a peer or the store did not deliver."""
        self._chunk_failures.labels(source, trouble).inc()

    def set_distribution_nodes(self, count: int) -> None:
        """Set the number of agents that receive download orders."""
        self._distribution_nodes.set(count)

    def count_watcher(self, role: str, change: int) -> None:
        """Count a watcher that connected (+1) or disconnected (-1)."""
        self._watchers.labels(role).inc(change)

    def count_request(self, route: str, status: int) -> None:
        """Count an answered admin request. `route` is the pattern of the route, not the path."""
        self._requests.labels(route, str(status)).inc()

    def show_unplaced(self, count: int) -> None:
        """Set the number of replicas without a node. A control plane that does not lead sets 0."""
        self._unplaced.set(count)

    def count_replica_seconds(self, pool_id: str, state: str, seconds: float) -> None:
        """Count the seconds that a pool's replicas spent `running` or `reserved`."""
        self._replica_s.labels(pool_id, state).inc(seconds)

    def render(self, feed: Feed) -> bytes:
        """Return all metrics in Prometheus' text format. Gauges show the feed's present state."""
        state = feed.state
        for kind in KINDS:
            self._objects.labels(kind).set(len(state.of_kind(kind)))
        self._show_replicas(state.replicas.values())
        self._version.set(state.version)
        self._database_up.set(feed.is_database_up)
        self._refresh_s.set(feed.refresh_s)
        return generate_latest(self.registry)

    def _show_replicas(self, replicas: Iterable[wire.Replica]) -> None:
        counts = Counts((replica.pool_id, int(replica.state)) for replica in replicas)
        self._replicas.clear()
        for pool_id in {pool_id for pool_id, _ in counts}:
            for name, state in wire.ReplicaState.items():
                if state != wire.REPLICA_STATE_UNSPECIFIED:
                    word = name.removeprefix(_STATE_PREFIX).lower()
                    self._replicas.labels(pool_id, word).set(counts[pool_id, state])
