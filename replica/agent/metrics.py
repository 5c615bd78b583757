"""Declares the agent's metrics. Replica ids are no labels, because they change too often."""

from collections.abc import Collection, Mapping
from math import inf

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from replica.agent.artifacts.library import Library
from replica.agent.hardware import HardwareState, Xid
from sluice.certificate_metric import CertificateExpiry
from sluice.wire.control.v1 import control_pb2 as control

# Field of a `GpuReading` -> name and description of its gauge.
_GPU_GAUGES = {
    "temperature_c": ("temperature_celsius", "Temperature of the chip"),
    "power_w": ("power_watts", "Power drawn"),
    "memory_used_bytes": ("memory_used_bytes", "Memory in use"),
    "ecc_uncorrected": (
        "uncorrected_errors",
        "Uncorrected memory errors since the driver was loaded",
    ),
}
_STATES = ("starting", "ready", "draining", "failed", "stopped", "sleeping")


class ArtifactMetrics:
    """Metrics of a node's artifact folder."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics."""
        self._count = Gauge(
            "agent_artifacts", "Artifacts that lie on this node as a whole", registry=registry
        )
        self._bytes = Gauge("agent_artifact_bytes", "Their size on the disk", registry=registry)
        self._evictions = Counter(
            "agent_artifact_evictions_total",
            "Artifacts that made way for others",
            registry=registry,
        )
        self._evictions_shown = 0
        self._spoiled = Counter(
            "agent_artifacts_spoiled_total",
            "Artifacts whose copy on the disk was not what its digest says",
            registry=registry,
        )
        self._spoiled_shown = 0
        self._moved = Counter(
            "agent_chunk_bytes_total",
            "Bytes of chunks fetched from peers (peer) and the store, or served to others (served)",
            ["way"],
            registry=registry,
        )
        self._moved_shown: dict[str, int] = {}

    def moved(self, downloaded: Mapping[str, int], uploaded: int) -> None:
        """Set the totals of chunk bytes received and sent since the agent started."""
        for way, total in {**downloaded, "served": uploaded}.items():
            self._moved.labels(way).inc(total - self._moved_shown.get(way, 0))
            self._moved_shown[way] = total

    def show(self, library: Library) -> None:
        """Set the figures of the artifact folder."""
        self._count.set(len(library.complete()))
        self._bytes.set(library.used_bytes)
        self._evictions.inc(library.evictions - self._evictions_shown)
        self._evictions_shown = library.evictions
        self._spoiled.inc(library.spoiled - self._spoiled_shown)
        self._spoiled_shown = library.spoiled


class AgentMetrics:
    """All metrics of the agent, on a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(CertificateExpiry())
        self.artifacts = ArtifactMetrics(self.registry)
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
        self._golden = Counter(
            "agent_golden_askings_total",
            "Golden prompts that replicas were asked",
            ["result"],
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
        self._engine_certificate = Gauge(
            "agent_engine_certificate_expiry_seconds",
            "Until the first of the certificates ends that engines read at their start",
            registry=self.registry,
        )
        self._engine_certificate.set(inf)
        self._register_hardware()

    def _register_hardware(self) -> None:
        self._cordons = Gauge(
            "agent_accelerators_cordoned", "Accelerators out of service", registry=self.registry
        )
        self._xids = Counter(
            "agent_xids_total",
            "Errors that the driver of NVIDIA's GPUs reported, by their number",
            ["xid"],
            registry=self.registry,
        )
        self._gpu = {
            field: Gauge(f"agent_accelerator_{name}", text, ["index"], registry=self.registry)
            for field, (name, text) in _GPU_GAUGES.items()
        }

    def probed(self, took_s: float, *, is_good: bool) -> None:
        """Count a probe of a ready engine by its result, and record the duration of a good one."""
        self._probes.labels("good" if is_good else "missed").inc()
        if is_good:
            self._probe_seconds.observe(took_s)

    def asked(self, *, is_answered: bool) -> None:
        """Count a golden request that has ended."""
        self._golden.labels("answered" if is_answered else "failed").inc()

    def failed(self) -> None:
        """Count a failed engine."""
        self._failures.inc()

    def adopted(self) -> None:
        """Count the adoption of an engine that an earlier agent started."""
        self._adoptions.inc()

    def became_ready(self, took_s: float) -> None:
        """Record the duration of an engine's start."""
        self._start_seconds.observe(took_s)

    def set_replicas(self, states: list[control.ReplicaState], memory_bytes: int) -> None:
        """Set the number of replicas in each state, and the engines' memory in bytes."""
        names = [control.ReplicaState.Name(state) for state in states]
        for state in _STATES:
            self._replicas.labels(state).set(names.count(f"REPLICA_STATE_{state.upper()}"))
        self._memory.set(memory_bytes)

    def set_hardware(self, state: HardwareState, xids: Collection[Xid]) -> None:
        """Set the readings of accelerators, and count the errors reported by their driver."""
        self._cordons.set(len(state.cordons))
        for xid in xids:
            self._xids.labels(str(xid.number)).inc()
        for gpu in state.gpus:
            for field, gauge in self._gpu.items():
                gauge.labels(str(gpu.index)).set(getattr(gpu, field))

    def set_engine_certificate(self, left_s: float) -> None:
        """Set the seconds until the engines' certificates expire, or infinity without an expiry."""
        self._engine_certificate.set(left_s)

    def set_connected(self, *, is_connected: bool) -> None:
        """Set whether the control plane is connected."""
        self._connected.set(is_connected)
