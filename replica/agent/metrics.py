"""Metrics of the agent. Replica ids are no labels: they come and go."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sluice.wire.control.v1 import control_pb2 as control

_STATES = ("starting", "ready", "draining", "failed", "stopped")


class AgentMetrics:
    """All metrics, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._replicas = Gauge(
            "agent_replicas", "Replicas on this node", ["state"], registry=self.registry
        )
        self._failures = Counter(
            "agent_engine_failures_total",
            "Engines that crashed, froze or did not start",
            registry=self.registry,
        )
        self._adoptions = Counter(
            "agent_adoptions_total",
            "Engines of an earlier agent that answered and were kept",
            registry=self.registry,
        )
        self._probes = Counter(
            "agent_probes_total",
            "Inferences that ask a ready engine for a sign of life",
            ["result"],
            registry=self.registry,
        )
        self._probe_seconds = Histogram(
            "agent_probe_seconds",
            "Duration of good probes",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0),
            registry=self.registry,
        )
        self._start_seconds = Histogram(
            "agent_engine_start_seconds",
            "From starting an engine to its first answer",
            buckets=(1, 2, 3, 5, 10, 20, 40, 60, 120, 300),
            registry=self.registry,
        )
        self._memory = Gauge(
            "agent_engine_memory_bytes",
            "Memory of all engine processes, shared pages counted once",
            registry=self.registry,
        )
        self._connected = Gauge(
            "agent_control_connected",
            "Whether the control plane has answered on the open stream",
            registry=self.registry,
        )

    def probed(self, took_s: float, *, is_good: bool) -> None:
        """Count a probe of a ready engine."""
        self._probes.labels("good" if is_good else "missed").inc()
        if is_good:
            self._probe_seconds.observe(took_s)

    def failed(self) -> None:
        """Count a failed engine."""
        self._failures.inc()

    def adopted(self) -> None:
        """Count an engine that was taken over."""
        self._adoptions.inc()

    def became_ready(self, took_s: float) -> None:
        """Record a start."""
        self._start_seconds.observe(took_s)

    def set_replicas(self, states: list[control.ReplicaState], memory_bytes: int) -> None:
        """Set how many replicas are in which state."""
        names = [control.ReplicaState.Name(state) for state in states]
        for state in _STATES:
            self._replicas.labels(state).set(names.count(f"REPLICA_STATE_{state.upper()}"))
        self._memory.set(memory_bytes)

    def set_connected(self, *, is_connected: bool) -> None:
        """Set whether there is a control plane."""
        self._connected.set(is_connected)
