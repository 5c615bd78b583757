"""What a dense Llama checkpoint is, and the refusal of everything that our graph does not compute.

A field that a graph builder ignores gives wrong tokens, not an error. So every field of config.json
must be one that we use, one that does not matter, or one with the only value that we support.
"""

from dataclasses import dataclass
from typing import Any

from replica.engine.artifact import ArtifactError

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
_USED = frozenset(
    {*_REQUIRED, "model_type", "num_key_value_heads", "head_dim", "rope_theta"}
    | {"tie_word_embeddings", "eos_token_id", "max_position_embeddings"}
)
# Training, bookkeeping, or what the tokenizer decides.
_HARMLESS = frozenset(
    {"_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype"}
    | {"initializer_range", "name_or_path", "pad_token_id", "torch_dtype", "transformers_version"}
    | {"use_cache", "unk_token_id", "max_window_layers"}
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "layer_types": (None,),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "rope_scaling": (None, {"rope_type": "default"}, {"type": "default"}),
    "sliding_window": (None,),
}
_MODEL_TYPES = ("llama", "mistral")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a dense decoder with RMS norms, rotary positions, grouped queries and SwiGLU."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rope_theta: float
    norm_epsilon: float
    has_tied_embeddings: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> "LlamaConfig":
        """Return what config.json describes; ArtifactError names the fields we cannot compute."""
        rope = dict(config.get("rope_parameters") or {})
        theta = rope.pop("rope_theta", None) or config.get("rope_theta", 10_000.0)
        problems = _problems({**config, "rope_parameters": None})
        if rope.pop("rope_type", "default") != "default" or rope:
            problems.append(f"rope_parameters {config['rope_parameters']!r}")
        if problems:
            raise ArtifactError(
                f"config.json: this engine cannot serve {', '.join(problems)}; use another base"
            )
        heads = int(config["num_attention_heads"])
        return cls(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            rope_theta=float(theta),
            norm_epsilon=float(config["rms_norm_eps"]),
            has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor of the checkpoint."""
        hidden, intermediate = self.hidden, self.intermediate
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.has_tied_embeddings:
            shapes["lm_head.weight"] = (self.vocabulary, hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            shapes[prefix + "self_attn.q_proj.weight"] = (query, hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (key, hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (key, hidden)
            shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
            shapes[prefix + "mlp.gate_proj.weight"] = (intermediate, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (intermediate, hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (hidden, intermediate)
        return shapes


def check_tensors(config: LlamaConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ArtifactError unless the checkpoint holds exactly the tensors of the config.

    Left-over tensors are biases, norms of queries or experts: parts of another architecture.
    """
    wanted = config.weight_shapes()
    harmless = {"lm_head.weight"} if config.has_tied_embeddings else set[str]()
    extra = sorted(
        name
        for name in shapes.keys() - wanted.keys() - harmless
        if not name.endswith(".rotary_emb.inv_freq")
    )
    missing = sorted(wanted.keys() - shapes.keys())
    wrong = sorted(
        f"{name} {shapes[name]} instead of {shape}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    )
    for problem, names in (("lacks", missing), ("also holds", extra), ("has", wrong)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ArtifactError(
                f"model.safetensors {problem} {', '.join(names[:3])}{more}: it does not fit to"
                " config.json; import the base anew"
            )


def _problems(config: dict[str, Any]) -> list[str]:
    problems = [f"a config without {name}" for name in _REQUIRED if config.get(name) is None]
    if config.get("model_type") not in _MODEL_TYPES:
        problems.append(f"model_type {config.get('model_type')!r}")
    for name, value in config.items():
        if name in _ONLY:
            if value not in _ONLY[name]:
                problems.append(f"{name} {value!r}")
        elif name not in _USED and name not in _HARMLESS and value not in (None, False):
            problems.append(f"{name} {value!r}")
    return problems
