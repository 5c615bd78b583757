"""Random models for tests: a base artifact in Hugging Face's layout, small enough to make in place.

The answers are nonsense; everything else (tokenizer, chat template, configuration, weights) is what
a real base has. The same seed gives the same files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from replica.engine.safetensors import Array, write_safetensors

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CONTEXT_TOKENS = 2048
# ChatML, as the shipped base has it.
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_TEXT = """A router owns a cell, and a cell holds replicas. The engine serves many sequences in one
step: some of them read their prompts, others write one token each. What was read once stays in the
cache, as long as there is room; who comes with the same beginning need not wait for it again.
You are a helpful assistant. What is the capital of France? Please count from one to twenty, and say
hello to all the people of the world: the quick brown fox jumps over the lazy dog, again and again.
"""
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 64, 2, 4, 2, 32, 176
_VOCABULARY_MAX = 512
# Ten times wider than usual: greedy outputs of a random model are diverse instead of constant.
_WEIGHT_SCALE = 0.2


def write_random_model(directory: Path, seed: int = 0) -> None:
    """Write a Llama base with random weights.

    Hidden size 64, 2 layers, 4 query and 2 KV heads of 32, tied embeddings, context 2,048 tokens,
    byte-level BPE of about 500 entries: config.json, model.safetensors, tokenizer.json,
    tokenizer_config.json and generation_config.json in `directory`, which is made if need be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(directory / "tokenizer.json")
    weights = _weights(np.random.default_rng(seed), vocabulary)
    write_safetensors(directory / "model.safetensors", weights)
    documents: dict[str, dict[str, Any]] = {
        "config.json": _config(vocabulary),
        "generation_config.json": {"bos_token_id": None, "eos_token_id": [2, 0], "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "model_max_length": CONTEXT_TOKENS,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1) + "\n")


def _config(vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "intermediate_size": _MLP,
        "vocab_size": vocabulary,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _weights(rng: np.random.Generator, vocabulary: int) -> dict[str, Array]:
    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) * _WEIGHT_SCALE).astype(np.float32)

    query, key = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    shapes = {
        "self_attn.q_proj": (query, _HIDDEN),
        "self_attn.k_proj": (key, _HIDDEN),
        "self_attn.v_proj": (key, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, query),
        "mlp.gate_proj": (_MLP, _HIDDEN),
        "mlp.up_proj": (_MLP, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _MLP),
    }
    tensors = {"model.embed_tokens.weight": matrix(vocabulary, _HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(_HIDDEN, np.float32)
    tensors["model.norm.weight"] = np.ones(_HIDDEN, np.float32)
    return tensors


def _write_tokenizer(path: Path) -> int:
    """Train and save the tokenizer; returns its number of entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_MAX,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    tokenizer.save(str(path))
    return int(tokenizer.get_vocab_size())
