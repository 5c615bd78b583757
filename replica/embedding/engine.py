"""Computes embeddings or scores of token ids, where several requests share a graph call.

A request that fails does not affect the others. All computation is float32, which is as fast as
half precision on CPUs. So a text's vector does not depend on the other texts of its batch. After
loading, the engine performs no I/O and starts no threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from replica.drivers.options import OptionsError, parse_options
from replica.embedding.batching import plan_batches
from replica.embedding.bert import read_bert_config
from replica.embedding.graph import build_graph
from replica.engine.safetensors import Array
from sluice.errors import BadRequestError, ErrorCode, FailedError, PlatformError

# Tokens per call. Larger calls are no faster, and each token needs 30 KB for intermediate results.
_CALL_TOKENS_MAX = 1024
_CALL_COST_TOKENS = 16  # fixed cost of a call, 1.5 to 3 ms, as a number of tokens of 0.18 ms each
# Largest number of compiled kernels that the plugin caches, one per input shape, to limit memory.
_KERNEL_CACHE = "64"
_LENGTH_ERROR_MAX = 1e-3  # largest deviation of an embedding's length from 1


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """Options of the embedding engine, set by SLUICE_ENGINE_OPTIONS.

    Attributes:
        threads: Threads of the computation. More threads speed up long batches, but compete with
            the chat engine for cores.
        tokens_max: Longest text in tokens with special tokens, or 0 for the base's own limit.
    """

    threads: int = 1
    tokens_max: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingLimits:
    """The limits of requests to an embedding engine.

    Attributes:
        dimensions: Length of a result: the dimensions of an embedding, or the number of labels.
        tokens_max: Largest number of tokens of one text with its special tokens.
        vocabulary: Number of token ids.
        reads_pairs: Whether the base classifies, so that a request may contain pairs of texts.
    """

    dimensions: int
    tokens_max: int
    vocabulary: int
    reads_pairs: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingBatch:
    """The results of requests that were computed together.

    Attributes:
        outcomes: Outcomes in the order of the requests, each either an array float32 [texts,
            dimensions] or an error.
        texts: Number of computed texts.
        tokens: Number of tokens of these texts.
        padding_tokens: Number of padding tokens that the graph also computed.
    """

    outcomes: list[Array | PlatformError]
    texts: int
    tokens: int
    padding_tokens: int


class EmbeddingEngine:
    """A compiled encoder, which computes one call at a time."""

    def __init__(self, model: ov.Model, limits: EmbeddingLimits, *, threads: int) -> None:
        """Compile `model`, a graph of `replica.embedding.graph`."""
        properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": str(threads),
            "CPU_RUNTIME_CACHE_CAPACITY": _KERNEL_CACHE,
        }
        self.limits = limits
        self._request = ov.Core().compile_model(model, "CPU", properties).create_infer_request()

    def embed(
        self, requests: Sequence[Array], second_begins: Sequence[int] | None = None
    ) -> EmbeddingBatch:
        """Compute several requests together, each an int array [texts, tokens] without padding.

        A request that is refused or fails does not affect the others. The outcome of a refused
        request is a `BadRequestError`, and that of a failed request is a `FailedError`.

        Args:
            requests: Token ids of each request.
            second_begins: For each request, the position in its rows where the second text begins,
                or 0 if its rows are single texts. None means 0 for all requests.
        """
        begins = second_begins or [0] * len(requests)
        outcomes: list[Array | PlatformError] = []
        texts: list[tuple[int, int]] = []  # (request, row)
        for number, request in enumerate(requests):
            refusal = self._refusal(request, begins[number])
            empty = np.empty((len(request), self.limits.dimensions), np.float32)
            outcomes.append(refusal or empty)
            if refusal is None:
                texts += [(number, row) for row in range(len(request))]
        rows = [requests[number][row] for number, row in texts]
        lengths = [len(row) for row in rows]
        plan = plan_batches(lengths, tokens_max=_CALL_TOKENS_MAX, call_tokens=_CALL_COST_TOKENS)
        computed = 0
        for group in plan:
            computed += len(group) * max(lengths[index] for index in group)
            try:
                vectors = self._compute(
                    [rows[index] for index in group], [begins[texts[index][0]] for index in group]
                )
            except RuntimeError as error:
                failure = FailedError(ErrorCode.ENGINE_FAILED, f"the graph call failed: {error}")
                for number in {texts[index][0] for index in group}:
                    outcomes[number] = failure
                continue
            for index, vector in zip(group, vectors, strict=True):
                number, row = texts[index]
                outcome = outcomes[number]
                if isinstance(outcome, PlatformError):
                    continue
                outcome[row] = vector
                if (problem := self._problem(vector)) is not None:
                    outcomes[number] = problem
        return EmbeddingBatch(outcomes, len(rows), sum(lengths), computed - sum(lengths))

    def _problem(self, vector: Array) -> FailedError | None:
        """Return an error if a vector cannot be correct, for example one of the wrong length."""
        if self.limits.reads_pairs:
            if np.isfinite(vector).all():
                return None
            return FailedError(ErrorCode.ENGINE_FAILED, "a score is no finite number")
        length = float(np.linalg.norm(vector))
        if abs(length - 1.0) <= _LENGTH_ERROR_MAX:  # False if the length is not a number
            return None
        return FailedError(ErrorCode.ENGINE_FAILED, f"a vector has length {length}, not 1")

    def _refusal(self, request: Array, second_begins: int) -> BadRequestError | None:
        """Return why a request cannot be served, with the limit and the value, or None."""
        limits = self.limits
        if request.ndim != 2 or not request.size:
            return BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"input_ids has the shape {list(request.shape)}: send [texts, tokens] with at"
                " least one of each",
            )
        tokens = request.shape[1]
        if second_begins and not (limits.reads_pairs and 0 < second_begins < tokens):
            return BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"second_begins is {second_begins} in a row of {tokens} tokens: "
                + ("send a place in it" if limits.reads_pairs else "this base reads single texts"),
            )
        if tokens > limits.tokens_max:
            return BadRequestError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the text has {tokens} tokens, special ones included, and this model takes at most"
                f" {limits.tokens_max}: send it in parts",
            )
        if request.min() < 0 or request.max() >= limits.vocabulary:
            return BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"a token id is outside the vocabulary of {limits.vocabulary} tokens",
            )
        return None

    def _compute(self, rows: Sequence[Array], second_begins: Sequence[int]) -> Array:
        longest = max(len(row) for row in rows)
        # zeros are padding, whose ids have no effect
        ids = np.zeros((len(rows), longest), np.int64)
        mask, kinds = np.zeros_like(ids), np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
            mask[number, : len(row)] = 1
            if begin := second_begins[number]:
                kinds[number, begin : len(row)] = 1
        self._request.set_tensor("input_ids", ov.Tensor(ids))
        self._request.set_tensor("attention_mask", ov.Tensor(mask))
        if self.limits.reads_pairs:
            self._request.set_tensor("token_type_ids", ov.Tensor(kinds))
        self._request.infer()
        return self._request.get_tensor("vectors").data.copy()


def load_embedding(directory: Path, options: Mapping[str, Any]) -> EmbeddingEngine:
    """Return the engine for the base in `directory`, compiled and ready.

    Raises:
        OptionsError: An option is unknown, of the wrong type, or impossible.
        ArtifactError: The directory has no base that the graph computes correctly.
    """
    chosen = parse_options(EmbeddingOptions, options)
    config = read_bert_config(directory)
    tokens_max = chosen.tokens_max or config.tokens_max
    if not 0 < tokens_max <= config.positions:
        raise OptionsError(
            f"tokens_max is {tokens_max}; this base has positions for 1..{config.positions}"
        )
    limits = EmbeddingLimits(
        config.labels or config.hidden, tokens_max, config.vocabulary, bool(config.labels)
    )
    return EmbeddingEngine(build_graph(directory, config), limits, threads=chosen.threads)
