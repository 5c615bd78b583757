"""Triton model `llm`: the engine host of `replica.host` inside Triton's Python backend.

Only what needs Triton's own module is here. Environment: SLUICE_ENGINE (a name of
replica.drivers.registry), SLUICE_ARTIFACT_DIR, SLUICE_BASE_DIGEST, SLUICE_ENGINE_OPTIONS (JSON).
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # pyright: ignore[reportMissingImports]

from replica.drivers.registry import load_driver
from replica.host import EngineHost
from sluice.hashing import BLOCK_TOKENS

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


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine; an exception here is the error that Triton reports for the model."""
        if int(np.__version__.split(".")[0]) >= 2:
            raise RuntimeError(
                f"numpy {np.__version__} corrupts tensors in Triton's Python backend; install"
                " 'numpy<2' into the environment whose python3 comes first on PATH"
            )
        engine = os.environ["SLUICE_ENGINE"]
        digest = os.environ["SLUICE_BASE_DIGEST"]
        options = json.loads(os.environ.get("SLUICE_ENGINE_OPTIONS") or "{}")
        artifact = os.environ.get("SLUICE_ARTIFACT_DIR")
        directory = Path(artifact) if artifact else None
        self._driver = load_driver(engine, directory, digest, options)
        self._host = EngineHost(self._driver, digest)
        self._make_metrics({"model": args["model_name"], "version": str(args["model_version"])})
        self._stopping = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="metrics", daemon=True)
        self._host.start()
        self._reporter.start()
        pb.Logger.log_info(f"engine {engine} serves base {digest}: {self._driver.limits}")

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the host; their responses come from its threads."""
        for request in requests:
            responder = TritonResponder(request.get_response_sender())
            frame = pb.get_input_tensor_by_name(request, "frame").as_numpy()
            self._host.handle(frame.tobytes(), responder)

    def finalize(self) -> None:
        """Stop the host."""
        self._host.close(DRAIN_S)
        self._stopping.set()
        self._reporter.join(METRICS_S)

    def _make_metrics(self, labels: dict[str, str]) -> None:
        """Declare metrics under TensorRT-LLM's names, so that one scraper reads both engines.

        The families are kept: a collected family takes its metrics along.
        """
        gauge = pb.MetricFamily.GAUGE
        counter = pb.MetricFamily.COUNTER
        self._families = [
            pb.MetricFamily(name=name, description=text, kind=kind)
            for name, text, kind in (
                ("nv_trt_llm_kv_cache_block_metrics", "KV cache blocks", gauge),
                ("nv_trt_llm_request_metrics", "Requests", gauge),
                ("llm_prefix_cache_tokens_total", "Prompt tokens by prefix cache result", counter),
                ("llm_preemptions_total", "Sequences put back into the queue", counter),
            )
        ]
        blocks, requests, prefix, preemptions = self._families

        def named(family: Any, label: str, names: tuple[str, ...]) -> dict[str, Any]:
            return {name: family.Metric(labels={**labels, label: name}) for name in names}

        self._blocks = named(
            blocks, "kv_cache_block_type", ("max", "free", "used", "tokens_per", "fraction")
        )
        self._requests = named(requests, "request_type", ("active", "scheduled", "waiting", "max"))
        self._prefix = named(prefix, "result", ("hit", "miss"))
        self._preemptions = preemptions.Metric(labels=labels)
        limits = self._driver.limits
        self._blocks["max"].set(limits.kv_blocks)
        self._blocks["tokens_per"].set(BLOCK_TOKENS)
        self._requests["max"].set(limits.sequences_max)

    def _report(self) -> None:
        total = self._driver.limits.kv_blocks
        last = self._host.load
        while not self._stopping.wait(METRICS_S):
            load = self._host.load
            self._blocks["used"].set(load.kv_blocks_used)
            self._blocks["free"].set(total - load.kv_blocks_used)
            self._blocks["fraction"].set(load.kv_blocks_used / total)
            self._requests["active"].set(load.running + load.waiting)
            self._requests["scheduled"].set(load.running)
            self._requests["waiting"].set(load.waiting)
            hit = load.cached_tokens - last.cached_tokens
            self._prefix["hit"].increment(hit)
            self._prefix["miss"].increment(load.prompt_tokens - last.prompt_tokens - hit)
            self._preemptions.increment(load.preemptions - last.preemptions)
            last = load
