"""Triton model `llm`: the engine host of `replica.host` inside Triton's Python backend.

This module has only the code that needs Triton's own module. It reads these variables:
SLUICE_ENGINE (a name of replica.drivers.registry) and SLUICE_ENGINE_OPTIONS (JSON).
SLUICE_BASE_DIGEST and SLUICE_ARTIFACT_DIR (of the base), and SLUICE_ARTIFACTS_DIR (of adapters, by
digest). SLUICE_AGENT_SOCKET (for requests of missing adapters).
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # pyright: ignore[reportMissingImports]

from replica.drivers.registry import load_driver
from replica.host import EngineHost
from replica.host.metrics import FAMILIES, EngineMetrics, Family, MetricKind, MetricsSample, Value
from replica.interpreter import check_interpreter

DRAIN_S = 2.0  # below Triton's --exit-timeout-secs
METRICS_S = 0.25


class TritonResponder:
    """A response sender. The host guarantees: one thread at a time, nothing after `finish`.

    `is_cancelled` of a sender that has sent FINAL ends the whole server with SIGSEGV, therefore the
    sender is dropped there.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, frame: bytes) -> None:
        """Send one frame."""
        tensor = pb.Tensor("frame", np.frombuffer(frame, np.uint8))
        self._sender.send(pb.InferenceResponse([tensor]))

    def finish(self) -> None:
        """Send FINAL."""
        sender, self._sender = self._sender, None
        try:
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:  # noqa: BLE001 - the client may have gone between two looks
            pb.Logger.log_warn(f"final response: {error!r}")

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
        return self._sender.is_cancelled()


class TritonMetrics:
    """Writes values to Triton's metrics port."""

    def __init__(self, labels: dict[str, str]) -> None:
        kinds = {
            MetricKind.GAUGE: pb.MetricFamily.GAUGE,
            MetricKind.COUNTER: pb.MetricFamily.COUNTER,
            MetricKind.HISTOGRAM: pb.MetricFamily.HISTOGRAM,
        }
        # The families are kept: a collected family takes its metrics along.
        self._families = {
            family.name: pb.MetricFamily(
                name=family.name, description=family.text, kind=kinds[family.kind]
            )
            for family in FAMILIES
        }
        self._labels = labels
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._written: dict[tuple[str, tuple[str, ...]], float] = {}

    def write(self, values: list[Value]) -> None:
        """Write what has changed: each write is a message to Triton's own process."""
        for value in values:
            family, series = value.family, (value.family.name, value.labels)
            metric = self._series.get(series)
            if metric is None:
                metric = self._series[series] = self._make(family, value.labels)
            before = self._written.get(series, 0.0)
            if family.kind is MetricKind.HISTOGRAM:
                metric.observe(value.value)
            elif value.value != before:
                self._written[series] = value.value
                if family.kind is MetricKind.GAUGE:
                    metric.set(value.value)
                else:
                    metric.increment(value.value - before)

    def _make(self, family: Family, values: tuple[str, ...]) -> Any:
        labels = {**self._labels, **dict(zip(family.labels, values, strict=True))}
        family_of_triton = self._families[family.name]
        if family.kind is MetricKind.HISTOGRAM:
            return family_of_triton.Metric(labels=labels, buckets=list(family.buckets))
        return family_of_triton.Metric(labels=labels)


class TritonPythonModel:
    """The methods that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine. Triton reports an exception of this method as the model's error."""
        check_interpreter()
        engine = os.environ["SLUICE_ENGINE"]
        digest = os.environ["SLUICE_BASE_DIGEST"]
        options = json.loads(os.environ.get("SLUICE_ENGINE_OPTIONS") or "{}")
        self._driver = load_driver(engine, _path("SLUICE_ARTIFACT_DIR"), digest, options)
        self._host = EngineHost(
            self._driver,
            digest,
            artifacts_dir=_path("SLUICE_ARTIFACTS_DIR"),
            agent_socket=_path("SLUICE_AGENT_SOCKET"),
        )
        self._metrics = TritonMetrics(
            {"model": args["model_name"], "version": str(args["model_version"])}
        )
        self._stopping = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="metrics", daemon=True)
        self._host.start()
        self._reporter.start()
        pb.Logger.log_info(f"engine {engine} serves base {digest}: {self._driver.limits}")

    def execute(self, requests: list[Any]) -> None:
        """Pass requests to the host, whose threads send the responses."""
        for request in requests:
            responder = TritonResponder(request.get_response_sender())
            frame = pb.get_input_tensor_by_name(request, "frame").as_numpy()
            self._host.handle(frame.tobytes(), responder)

    def finalize(self) -> None:
        """Stop the host."""
        self._host.close(DRAIN_S)
        self._stopping.set()
        self._reporter.join(METRICS_S)

    def _report(self) -> None:
        """Write metrics now and then, also while the step loop stands still."""
        metrics, host = EngineMetrics(), self._host
        while not self._stopping.wait(METRICS_S):
            look = MetricsSample(
                load=host.load,
                limits=self._driver.limits,
                counters=host.counters,
                adapters=host.adapters,
                step_age_s=host.step_age_s,
                memory_bytes=_resident_bytes(),
                time_us=time.time_ns() // 1000,
            )
            self._metrics.write(metrics.values(look))


def _path(variable: str) -> Path | None:
    path = os.environ.get(variable)
    return Path(path) if path else None


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
