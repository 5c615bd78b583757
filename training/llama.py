"""A plain dense Llama in torch whose weights have the names and the meaning of Hugging Face's.

Only what the engine serves: no biases, default rope in halves, tied embeddings, grouped queries.
Rows are padded on the right, so the causal mask is the only one that is needed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from training.tokenizer import CONTEXT_TOKENS_MAX, PAD_ID, TURN_END_ID, VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network; the vocabulary and the context belong to the tokenizer."""

    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 384
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": TURN_END_ID,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": CONTEXT_TOKENS_MAX,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": PAD_ID,
            "rms_norm_eps": self.norm_epsilon,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "float16",
            "use_cache": True,
            "vocab_size": VOCAB_SIZE,
        }

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        """Return the shape that `config.json` describes."""
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate=config["intermediate_size"],
            rope_theta=config["rope_theta"],
            norm_epsilon=config["rms_norm_eps"],
        )


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what the heads read, before `o_proj`: shape (rows, tokens, heads * head_dim)."""
        rows, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)

        query = _rotated(heads(self.q_proj(x)), cos, sin) * self.shape.head_dim**-0.5
        key, value = _rotated(heads(self.k_proj(x)), cos, sin), heads(self.v_proj(x))
        mixed = _attended(query, key, value)
        return mixed.transpose(1, 2).reshape(rows, length, -1)


# Beyond this the written-out scores would fill the memory.
_SHORT_TOKENS_MAX = 512


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention, written out on short rows: it takes two thirds of torch's time.

    Shapes are (rows, heads, tokens, head_dim); consecutive query heads share a key head, so they
    are laid one after the other along the tokens.
    """
    rows, kv_heads, length, dim = key.shape
    if length > _SHORT_TOKENS_MAX:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=1.0, enable_gqa=True
        )
    group = query.shape[1] // kv_heads
    future = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1)
    scores = torch.baddbmm(
        future.repeat(group, 1),
        query.reshape(rows * kv_heads, group * length, dim),
        key.reshape(rows * kv_heads, length, dim).transpose(1, 2),
    )
    mixed = torch.bmm(scores.softmax(-1), value.reshape(rows * kv_heads, length, dim))
    return mixed.view(query.shape)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` of shape (rows, heads, tokens, head_dim) turned by rope, in halves."""
    low, high = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-high, low), -1) * sin.to(x.dtype)


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = _Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor | None) -> Tensor:
        read = self.self_attn(self.input_layernorm(x), cos, sin)
        if wanted is not None:
            x, read = x[wanted], read[wanted]
        x = x + self.self_attn.o_proj(read)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)


class Llama(nn.Module):
    """The network; `state_dict` has exactly the tensors of the shipped file."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Decoder(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * shape.layers) ** -0.5 if is_output else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def hidden_states(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the normed states, shape (wanted tokens, hidden), of ids of (rows, tokens).

        `wanted` is a mask of (rows, tokens): for the others the last layer computes only what the
        wanted ones attend to. In training those are two thirds.
        """
        cos, sin = self._rope(ids.shape[1])
        x = self.model.embed_tokens(ids)
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, wanted if index == last else None)
        return self.model.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """Return the scores of the next token for `states` of (..., hidden)."""
        return functional.linear(states, self.model.embed_tokens.weight)

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        dim = self.shape.head_dim
        inverse = self.shape.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * inverse
        angle = torch.cat((angle, angle), -1).float()
        return angle.cos(), angle.sin()


def save(model: Llama, out: Path) -> None:
    """Write `config.json` and `model.safetensors` in float16; readers never see half a file."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(model.shape.config(), indent=2) + "\n")
    tensors = {
        name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()
    }
    unfinished = out / "model.safetensors.unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(out / "model.safetensors")


def load(path: Path) -> Llama:
    """Return the model of the directory `path`, its weights widened to float32."""
    model = Llama(Shape.of(json.loads((path / "config.json").read_text())))
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model.float().eval()
