"""Random models for tests that embed (in sentence-transformers' layout) or classify.

The vectors mean nothing; everything else is what a real base has. The same seed gives the same
files.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
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


def write_random_bert(directory: Path, seed: int = 0, labels: int = 0) -> None:
    """Write a BERT of the sizes `TINY` with random weights and no tokenizer in `directory`.

    Args:
        directory: Is made if it does not exist.
        seed: Decides the weights.
        labels: Scores of a base that classifies; 0: it embeds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.standard_normal(shape) * _WEIGHT_SCALE).astype(np.float32)
        for name, shape in replace(TINY, labels=labels).weight_shapes().items()
    }
    for name in tensors:
        if name.endswith("LayerNorm.weight"):
            tensors[name] += 1.0
    if labels:
        _write_classifier(directory, tensors, labels)
        return
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


def _write_classifier(directory: Path, tensors: Mapping[str, Any], labels: int) -> None:
    """Write a base in the form of transformers: its encoder is named, its head is not."""
    named = {
        name if name.startswith("classifier.") else f"bert.{name}": values
        for name, values in tensors.items()
    }
    write_safetensors(directory / "model.safetensors", named)
    config = _config() | {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(at): f"LABEL_{at}" for at in range(labels)},
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


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
