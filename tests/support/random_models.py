"""Random models for tests: bases and adapters in the layouts of Hugging Face and PEFT.

Small enough to make in place. The answers are nonsense; everything else (tokenizer, chat template,
configuration, weights) is what a real base has. The same seed gives the same files.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replica.engine.architectures import PROJECTIONS, ModelConfig
from replica.engine.artifact import read_json
from replica.engine.lora import CONFIG_FILE, TENSOR_FILE
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
_ADAPTER_SCALE = 0.1  # adapters change nearly every greedy token
_ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 4096}),
    "qwen3": ("Qwen3ForCausalLM", {"use_sliding_window": False, "sliding_window": None}),
}


def write_random_model(
    directory: Path,
    seed: int = 0,
    *,
    architecture: str = "llama",
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write a base with random weights.

    Hidden size 64, 2 layers, 4 query and 2 KV heads of 32, tied embeddings, context 2,048 tokens,
    byte-level BPE of about 500 entries: config.json, model.safetensors, tokenizer.json,
    tokenizer_config.json and generation_config.json in `directory`, which is made if need be.

    Args:
        directory: Of the base.
        seed: Of the weights.
        architecture: `model_type`: llama, mistral, qwen2 or qwen3.
        changes: Fields of config.json to add or replace.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(directory / "tokenizer.json")
    config = {**_config(vocabulary, architecture), **(changes or {})}
    weights = _weights(np.random.default_rng(seed), ModelConfig.of(config))
    write_safetensors(directory / "model.safetensors", weights)
    documents: dict[str, dict[str, Any]] = {
        "config.json": config,
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


def write_random_adapter(
    directory: Path,
    base: Path,
    seed: int = 0,
    *,
    rank: int = 8,
    targets: Iterable[str] = PROJECTIONS,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write a LoRA adapter with random weights: adapter_config.json, adapter_model.safetensors.

    Args:
        directory: Of the adapter; made if need be.
        base: Directory of the base that it is for.
        seed: Of the weights.
        rank: Of all its matrices.
        targets: Of `PROJECTIONS`, in every layer.
        changes: Fields of adapter_config.json to add or replace.
    """
    config = ModelConfig.of(read_json(base / "config.json"))
    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    names = list(targets)
    for layer in range(config.layers):
        for name in names:
            outputs, inputs = config.projection_shapes()[name]
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = rng.standard_normal(shape) * _ADAPTER_SCALE
                tensors[f"{prefix}{half}.weight"] = values.astype(np.float32)
    document: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.rpartition(".")[2] for name in names],
        **(changes or {}),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(document, indent=1) + "\n")
    write_safetensors(directory / TENSOR_FILE, tensors)


def _config(vocabulary: int, architecture: str) -> dict[str, Any]:
    name, own = _ARCHITECTURES[architecture]
    return {
        "architectures": [name],
        "model_type": architecture,
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
        **own,
    }


def _weights(rng: np.random.Generator, config: ModelConfig) -> dict[str, Array]:
    """Return random matrices and biases; norms are 1, but for those of single heads."""
    tensors: dict[str, Array] = {}
    for name, shape in config.weight_shapes().items():
        values = np.ones(shape)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            values = 1 + rng.standard_normal(shape) * _WEIGHT_SCALE
        elif "norm" not in name:
            values = rng.standard_normal(shape) * _WEIGHT_SCALE
        tensors[name] = values.astype(np.float32)
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
