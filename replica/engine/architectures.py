"""Reads the configuration of a checkpoint, and refuses everything that the graph cannot compute.

A field that a graph builder ignores causes wrong tokens, not an error. So each field of config.json
must be used, have no effect on inference, or have the only supported value.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from replica.engine.artifact import ArtifactError
from replica.engine.quantized import quantization_problem
from replica.engine.rope import Rope

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
_USED = frozenset(
    {*_REQUIRED, "model_type", "num_key_value_heads", "head_dim", "layer_types"}
    | {"tie_word_embeddings", "eos_token_id", "max_position_embeddings", "quantization_config"}
    | {"rope_theta", "rope_scaling", "rope_parameters"}
)
# Fields about training or the tokenizer, which do not affect the graph.
_HARMLESS = frozenset(
    {"_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype"}
    | {"initializer_range", "name_or_path", "pad_token_id", "torch_dtype", "transformers_version"}
    | {"use_cache", "unk_token_id", "max_window_layers"}
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences between a family of dense decoders and Llama.

    Attributes:
        has_qkv_bias: Whether the projections to query, key and value have a bias.
        has_qk_norm: Whether an RMS norm is applied to each head of query and key before the
            rotation.
        required: Fields that must be present, because the reference implementation of this family
            has special defaults for them.
        window: Fields that define layers with a sliding window, or empty if no layer has a window.
    """

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    required: tuple[str, ...] = ()
    window: tuple[str, ...] = ()


_QWEN_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers")
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(
        required=("num_key_value_heads", "sliding_window"), window=("sliding_window",)
    ),
    "qwen2": Architecture(
        has_qkv_bias=True, required=("num_key_value_heads",), window=_QWEN_WINDOW
    ),
    "qwen3": Architecture(
        has_qk_norm=True, required=("num_key_value_heads", "head_dim"), window=_QWEN_WINDOW
    ),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder with RMS norms, rotary positions, grouped queries and SwiGLU.

    Attributes:
        windows: Per layer, the number of tokens that a token attends to, including itself. 0 means
            itself and all tokens before it.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rope: Rope
    norm_epsilon: float
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    windows: tuple[int, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Return the model described by config.json.

        Raises ArtifactError, which names the unsupported fields.
        """
        architecture = ARCHITECTURES.get(str(config.get("model_type")))
        if architecture is None:
            raise _refused([f"model_type {config.get('model_type')!r}"])
        problems = _problems(config, architecture)
        if problems:
            raise _refused(problems)
        try:
            made = cls._read(config, architecture)
        except (TypeError, ValueError) as error:
            raise _refused([str(error)]) from None
        problems = _contradictions(made)
        if problems:
            raise _refused(problems)
        return made

    @classmethod
    def _read(cls, config: Mapping[str, Any], architecture: Architecture) -> "ModelConfig":
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return cls(
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // max(1, heads)),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            rope=Rope.of(config),
            norm_epsilon=float(config["rms_norm_eps"]),
            has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            has_qkv_bias=architecture.has_qkv_bias,
            has_qk_norm=architecture.has_qk_norm,
            windows=_windows(config, architecture),
        )

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape (outputs, inputs) of each of a layer's `PROJECTIONS`."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = (query, key, key, self.hidden, self.intermediate, self.intermediate, self.hidden)
        columns = (*[self.hidden] * 3, query, *[self.hidden] * 2, self.intermediate)
        return dict(zip(PROJECTIONS, zip(rows, columns, strict=True), strict=True))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor of the checkpoint."""
        hidden = (self.hidden,)
        projections = self.projection_shapes()
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "model.norm.weight": hidden,
        }
        if not self.has_tied_embeddings:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = hidden
            shapes[prefix + "post_attention_layernorm.weight"] = hidden
            for name, shape in projections.items():
                shapes[f"{prefix}{name}.weight"] = shape
            if self.has_qkv_bias:
                for name in PROJECTIONS[:3]:
                    shapes[f"{prefix}{name}.bias"] = projections[name][:1]
            if self.has_qk_norm:
                for name in ("self_attn.q_norm", "self_attn.k_norm"):
                    shapes[f"{prefix}{name}.weight"] = (self.head_dim,)
        return shapes


def _refused(problems: Iterable[str]) -> ArtifactError:
    return ArtifactError(
        f"config.json: this engine cannot serve {', '.join(problems)}; use another base"
        f" (supported are {', '.join(ARCHITECTURES)}, dense, as float or INT8 safetensors)"
    )


def _problems(config: Mapping[str, Any], architecture: Architecture) -> list[str]:
    problems = [f"a config without {name}" for name in _REQUIRED if config.get(name) is None]
    problems += [f"a config without {name}" for name in architecture.required if name not in config]
    used = {*_USED, *architecture.window}
    for name, value in config.items():
        if name in _ONLY:
            if value not in _ONLY[name]:
                problems.append(f"{name} {value!r}")
        elif name not in used and name not in _HARMLESS and value not in (None, False):
            problems.append(f"{name} {value!r}")
    quantization = config.get("quantization_config")
    if quantization is not None and (problem := quantization_problem(quantization)):
        problems.append(f"quantization_config {problem}")
    return problems


def _contradictions(config: ModelConfig) -> list[str]:
    """Return one description for each contradiction between sizes in a config."""
    sizes = (config.hidden, config.layers, config.heads, config.kv_heads, config.head_dim)
    if min(*sizes, config.intermediate, config.vocabulary) < 1:
        return ["sizes below 1"]
    problems: list[str] = []
    if config.heads % config.kv_heads:
        problems.append(f"{config.heads} heads over num_key_value_heads {config.kv_heads}")
    if config.head_dim % 2:
        problems.append(f"an odd head_dim {config.head_dim}")
    return problems


def _windows(config: Mapping[str, Any], architecture: Architecture) -> tuple[int, ...]:
    """Return the sliding window of each layer. Raises ValueError for contradictory fields."""
    layers = int(config["num_hidden_layers"])
    window = int(config.get("sliding_window") or 0) if architecture.window else 0
    if window < 0:
        raise ValueError(f"sliding_window {window}")
    first = 0
    if "use_sliding_window" in architecture.window:
        window = window if config.get("use_sliding_window") else 0
        first = int(config.get("max_window_layers") or 0)
    given = config.get("layer_types")
    if given is None:
        return tuple(window if layer >= first else 0 for layer in range(layers))
    types = list(cast("Iterable[Any]", given))
    if len(types) != layers or not {_FULL, _SLIDING}.issuperset(types):
        raise ValueError(f"layer_types {types!r}")
    if _SLIDING in types and not window:
        raise ValueError("layer_types with sliding_attention but without a sliding_window")
    return tuple(window if kind == _SLIDING else 0 for kind in types)
