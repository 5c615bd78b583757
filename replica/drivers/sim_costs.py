"""Computes the duration of a step from its work, for the driver `sim`. Pure.

There are three kinds of cost models. None was measured for this project.

* `custom` uses constants of the engine options, whose defaults are invented.
* `h70` and `m8` are published fits for one deployment each. The fit h70 is Llama-3-70B in bf16 on
  four H100. Preble measured a fit for two GPUs (arXiv 2407.00023). The fit h70 halves its times for
  four GPUs at a scaling of 0.9, and uses a roofline for decode. The fit m8 is the polynomial of
  Dynamo's mocker for the 8B class.
* `<gpu>-<model>` (`h100-8b`, `b200-70b`, ...) is a roofline estimate from the vendor's data sheets
  and the shapes in the models' config.json:

      step = launches + all-reduces
             + max(flops / (gpus * peak * 0.5), bytes / (gpus * bandwidth * 0.75))
      flops = 2 * parameters * tokens + 4 * layers * width * (query, key) pairs
      bytes = weights + KV bytes per token * tokens attended to
      all-reduces = 2 * layers * (10 us + 2 * tokens * width * 2 bytes * (gpus - 1) / gpus / link),
                    0 on one GPU

  Large matrix products in prefill reach 0.5 of the peak. The share 0.75 of the bandwidth is that of
  the fit h70. Launches of 2 ms per step and 10 us per all-reduce are typical with CUDA graphs and
  NVLink. The estimates should be right within a factor of two, and the order of GPUs should be
  right.
"""

from dataclasses import dataclass
from typing import Protocol

from sluice.hashing import BLOCK_TOKENS

_STEP_TOKENS = 2048
_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step, in the units of the cost models.

    Attributes:
        prefill_tokens: Number of prompt tokens.
        prefill_pairs: Sum, over prompt parts, of tokens * (tokens before the part + tokens / 2).
        prefill_context: Sum, over prompt parts, of the number of tokens before the part.
        decode_tokens: Number of computed tokens of decoding sequences. A sequence has one, plus the
            tokens of its draft.
        decode_context: Number of tokens that the decoding sequences attend to.
        adapter_loads: Number of adapters copied into slots.
    """

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    prefill_context: int = 0
    decode_tokens: int = 0
    decode_context: int = 0
    adapter_loads: int = 0


@dataclass(frozen=True, slots=True)
class EngineSize:
    """The capacity of an engine. It applies where the engine options have 0.

    Attributes:
        blocks: Number of KV blocks.
        step_tokens_max: Largest number of tokens per step.
        sequences_max: Largest number of running sequences.
    """

    blocks: int
    step_tokens_max: int = _STEP_TOKENS
    sequences_max: int = _SEQUENCES


class CostModel(Protocol):
    """The step times and the capacity of one kind of engine."""

    @property
    def size(self) -> EngineSize:
        """The capacity of the engine."""
        ...

    def step_s(self, work: StepWork) -> float:
        """Return the duration of a step in seconds, without the loads of adapters."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Step times as a sum of linear terms, with the constants of `SimOptions`."""

    size: EngineSize
    step: float
    decode_row: float
    prefill_token: float
    context_token: float
    prefill_pair: float = 0.0

    def step_s(self, work: StepWork) -> float:
        """Return the duration of a step in seconds."""
        return (
            self.step
            + self.decode_row * work.decode_tokens
            + self.prefill_token * work.prefill_tokens
            + self.prefill_pair * work.prefill_pairs
            + self.context_token * (work.decode_context + work.prefill_context)
        )


class H70Cost:
    """Step times of Llama-3-70B in bf16 on 4 x H100 (see the module's docstring)."""

    size = EngineSize(blocks=448_000 // BLOCK_TOKENS)

    def step_s(self, work: StepWork) -> float:
        """Return the duration of a step in seconds."""
        milliseconds = (
            18
            + 0.0444 * work.prefill_tokens
            + 4.14e-7 * work.prefill_pairs
            + 0.020 * work.decode_tokens
            + 3.4e-5 * work.decode_context
        )
        return milliseconds * 1e-3


class M8Cost:
    """Step times of Dynamo's mocker for the 8B class (see the module's docstring).

    The mocker's prefill polynomial for a whole prompt of n tokens is 16.50 ms + 0.01518 n + 4.21e-7
    n^2. The constant includes the 5.74 ms of an empty decode step, which a step with both kinds of
    work pays once. A chunk of n tokens after b tokens costs (b + n)^2 - b^2, twice its pairs.
    """

    _KV_TOKENS = 16_384 * 64
    size = EngineSize(blocks=_KV_TOKENS // BLOCK_TOKENS)

    def step_s(self, work: StepWork) -> float:
        """Return the duration of a step in seconds."""
        milliseconds = 5.74
        if work.decode_tokens:
            used = min(1.0, work.decode_context / self._KV_TOKENS)
            milliseconds += 54.01 * used - 25.74 * used * used
        if work.prefill_tokens:
            milliseconds += 10.76142 + 0.01518344 * work.prefill_tokens
            milliseconds += 2 * 4.209989e-7 * work.prefill_pairs
        return milliseconds * 1e-3


@dataclass(frozen=True, slots=True)
class Gpu:
    """Figures of a GPU's data sheet.

    `flops` is the peak for dense bf16. `link_bytes_s` is the sum of NVLink's two directions.
    """

    flops: float
    bandwidth_bytes_s: float
    memory_bytes: float
    link_bytes_s: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a model in bf16, from its config.json."""

    parameters: float
    layers: int
    width: int
    kv_heads: int
    head_dim: int

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


# SXM modules, from the vendor's data sheets. The peaks are without sparsity.
GPUS = {
    "a100": Gpu(312e12, 2.039e12, 80e9, 600e9),
    "h100": Gpu(989e12, 3.35e12, 80e9, 900e9),
    "h200": Gpu(989e12, 4.8e12, 141e9, 900e9),
    "b200": Gpu(2250e12, 8.0e12, 180e9, 1800e9),
}
# Llama 3.1, from the config.json of each size.
MODELS = {
    "8b": ModelShape(8.03e9, 32, 4096, 8, 128),
    "70b": ModelShape(70.6e9, 80, 8192, 8, 128),
}
# GPUs per replica: the smallest of 1, 2, 4 and 8 with memory for weights and a useful cache.
_TENSOR_PARALLEL = {
    ("a100", "70b"): 4,
    ("h100", "70b"): 4,
    ("h200", "70b"): 2,
    ("b200", "70b"): 2,
}
# Share of a GPU's memory for weights and cache. Activations and runtime need the remaining memory.
_MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Estimated step times for any GPU and dense model, by the formula in the module's docstring.

    Attributes:
        gpus: Number of tensor-parallel GPUs.
    """

    gpu: Gpu
    model: ModelShape
    gpus: int

    _LAUNCHES_S = 2e-3
    _COMPUTE_SHARE = 0.5
    _BANDWIDTH_SHARE = 0.75
    _ALL_REDUCE_S = 10e-6

    @property
    def size(self) -> EngineSize:
        """The capacity of the engine. Its cache uses the memory that the weights leave free."""
        left = self.gpus * self.gpu.memory_bytes * _MEMORY_SHARE - 2 * self.model.parameters
        return EngineSize(blocks=int(left / self.model.kv_token_bytes) // BLOCK_TOKENS)

    def step_s(self, work: StepWork) -> float:
        """Return the duration of a step in seconds."""
        gpu, model = self.gpu, self.model
        tokens = work.prefill_tokens + work.decode_tokens
        pairs = work.prefill_pairs + work.decode_context
        flops = 2 * model.parameters * tokens + 4 * model.layers * model.width * pairs
        attended = work.decode_context + work.prefill_context + work.prefill_tokens
        moved_bytes = 2 * model.parameters + model.kv_token_bytes * attended
        compute_s = flops / (self.gpus * gpu.flops * self._COMPUTE_SHARE)
        memory_s = moved_bytes / (self.gpus * gpu.bandwidth_bytes_s * self._BANDWIDTH_SHARE)
        return self._LAUNCHES_S + max(compute_s, memory_s) + self._all_reduces_s(tokens)

    def _all_reduces_s(self, tokens: int) -> float:
        if self.gpus == 1:
            return 0.0
        sent_bytes = 2 * tokens * self.model.width * 2 * (self.gpus - 1) / self.gpus
        return 2 * self.model.layers * (self._ALL_REDUCE_S + sent_bytes / self.gpu.link_bytes_s)


MODELS_BY_NAME: dict[str, CostModel] = {
    "h70": H70Cost(),
    "m8": M8Cost(),
    **{
        f"{gpu}-{model}": RooflineCost(
            GPUS[gpu], MODELS[model], _TENSOR_PARALLEL.get((gpu, model), 1)
        )
        for gpu in GPUS
        for model in MODELS
    },
}
