"""Triton model `embed`: vectors of texts by `replica.embedding` in Triton's Python backend.

Only what needs Triton's own module is here. Environment: SLUICE_ARTIFACT_DIR, SLUICE_BASE_DIGEST,
SLUICE_ENGINE_OPTIONS (JSON).
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # pyright: ignore[reportMissingImports]

from replica.embedding.engine import EmbeddingBatch, load_embedding
from replica.interpreter import check_interpreter
from sluice.embeddings import SECOND_BEGINS, render_refusal
from sluice.errors import BadRequestError, PlatformError

_TEXTS_BUCKETS = [1, 2, 4, 8, 16]


class TritonPythonModel:
    """The methods that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine. Triton reports an exception of this method as the model's error."""
        check_interpreter()
        digest = os.environ["SLUICE_BASE_DIGEST"]
        artifact = os.environ.get("SLUICE_ARTIFACT_DIR")
        if not artifact:
            raise RuntimeError("the engine embed needs a base artifact; import one on this node")
        options = json.loads(os.environ.get("SLUICE_ENGINE_OPTIONS") or "{}")
        self._engine = load_embedding(Path(artifact), options)
        self._digest = np.frombuffer(digest.encode(), np.uint8)[None, :]
        self._make_metrics({"model": args["model_name"], "version": str(args["model_version"])})
        pb.Logger.log_info(f"engine embed serves base {digest}: {self._engine.limits}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests that Triton gathered. A failure affects only its own request."""
        arrays = [pb.get_input_tensor_by_name(r, "input_ids").as_numpy() for r in requests]
        batch = self._engine.embed(arrays, [_second_begins(request) for request in requests])
        self._count(batch)
        return [
            self._response(request, outcome)
            for request, outcome in zip(requests, batch.outcomes, strict=True)
        ]

    def _response(self, request: Any, outcome: Any) -> Any:
        if isinstance(outcome, PlatformError):
            kind = pb.TritonError
            code = kind.INVALID_ARG if isinstance(outcome, BadRequestError) else kind.INTERNAL
            return pb.InferenceResponse(error=kind(render_refusal(outcome), code))
        tensors = [pb.Tensor("embedding", outcome)]
        if "base_digest" in request.requested_output_names():
            tensors.append(pb.Tensor("base_digest", self._digest.repeat(len(outcome), axis=0)))
        return pb.InferenceResponse(tensors)

    def _make_metrics(self, labels: dict[str, str]) -> None:
        """Declare metrics. A family that is not kept is collected together with its metrics."""
        counter, histogram = pb.MetricFamily.COUNTER, pb.MetricFamily.HISTOGRAM
        self._families = [
            pb.MetricFamily(name=name, description=text, kind=kind)
            for name, text, kind in (
                ("embed_requests_total", "Embedding requests by outcome", counter),
                ("embed_tokens_total", "Tokens computed: of texts, and padding", counter),
                ("embed_batch_texts", "Texts that were computed together", histogram),
            )
        ]
        requests, tokens, texts = self._families
        self._requests = {
            result: requests.Metric(labels={**labels, "result": result})
            for result in ("ok", "refused", "failed")
        }
        self._tokens = {
            kind: tokens.Metric(labels={**labels, "kind": kind}) for kind in ("text", "padding")
        }
        self._texts = texts.Metric(labels=labels, buckets=_TEXTS_BUCKETS)

    def _count(self, batch: EmbeddingBatch) -> None:
        for outcome in batch.outcomes:
            refused = "refused" if isinstance(outcome, BadRequestError) else "failed"
            self._requests[refused if isinstance(outcome, PlatformError) else "ok"].increment(1)
        self._tokens["text"].increment(batch.tokens)
        self._tokens["padding"].increment(batch.padding_tokens)
        if batch.texts:
            self._texts.observe(batch.texts)


def _second_begins(request: Any) -> int:
    """Return the start of the second text in each row of a request, or 0 for single texts."""
    told = request.parameters()
    value = json.loads(told).get(SECOND_BEGINS, 0) if SECOND_BEGINS in told else 0
    return value if isinstance(value, int) else -1  # which the engine refuses
