"""Random embedding models for tests: a base in sentence-transformers' layout, made in place.

The vectors mean nothing; everything else is what a real base has. The same seed gives the same
files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from replica.embedding.bert import BertConfig
from replica.engine.safetensors import write_safetensors

TINY = BertConfig(
    hidden=32,
    layers=2,
    heads=4,
    intermediate=64,
    vocabulary=300,
    positions=96,
    token_types=2,
    norm_epsilon=1e-12,
    tokens_max=64,
)
_WEIGHT_SCALE = 0.3  # ten times wider than usual: different texts get clearly different vectors


def write_random_bert(directory: Path, seed: int = 0) -> None:
    """Write a BERT of the sizes `TINY` with random weights and no tokenizer in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.standard_normal(shape) * _WEIGHT_SCALE).astype(np.float32)
        for name, shape in TINY.weight_shapes().items()
    }
    for name in tensors:
        if name.endswith("LayerNorm.weight"):
            tensors[name] += 1.0
    write_safetensors(directory / "model.safetensors", tensors)
    kinds = ("Transformer", "Pooling", "Normalize")
    documents: dict[str, Any] = {
        "config.json": _config(),
        "sentence_bert_config.json": {"max_seq_length": TINY.tokens_max, "do_lower_case": False},
        "modules.json": [
            {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"models.{kind}"}
            for i, kind in enumerate(kinds)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": TINY.hidden,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
        },
    }
    for name, document in documents.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def _config() -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": TINY.hidden,
        "num_hidden_layers": TINY.layers,
        "num_attention_heads": TINY.heads,
        "intermediate_size": TINY.intermediate,
        "vocab_size": TINY.vocabulary,
        "max_position_embeddings": TINY.positions,
        "type_vocab_size": TINY.token_types,
        "layer_norm_eps": TINY.norm_epsilon,
        "position_embedding_type": "absolute",
        "pad_token_id": 0,
    }
