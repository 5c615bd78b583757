"""Defines a tiny random BERT, and a reference in numpy and float64 for one text at a time."""

import json
from collections.abc import Callable, Sequence
from math import erf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replica.engine.safetensors import read_safetensors
from tests.support.random_bert import write_random_bert

Reference = Callable[[Path, Sequence[int]], np.ndarray]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedding") / "base"
    write_random_bert(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("classifier") / "base"
    write_random_bert(directory, labels=3)
    return directory


@pytest.fixture(scope="session")
def reference() -> Reference:
    return embed


def embed(directory: Path, ids: Sequence[int], second_begins: int = 0) -> np.ndarray[Any, Any]:
    """Return the embedding or the scores of one text or pair, by the definition of BERT."""
    config = json.loads((directory / "config.json").read_text())
    w = {
        name.removeprefix("bert."): array.astype(np.float64)
        for name, array in read_safetensors(directory / "model.safetensors").items()
    }
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]

    def norm(x, name):
        centred = x - x.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
        return centred / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    kinds = [int(0 < second_begins <= place) for place in range(len(ids))]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][kinds], "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        p = f"encoder.layer.{layer}."
        q, k, v = (linear(x, f"{p}attention.self.{n}") for n in ("query", "key", "value"))
        width = q.shape[1] // heads
        mixed = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T / sqrt(width)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, part])
        attended = linear(np.concatenate(mixed, axis=1), f"{p}attention.output.dense")
        x = norm(x + attended, f"{p}attention.output.LayerNorm")
        inner = linear(x, f"{p}intermediate.dense")
        inner = inner * 0.5 * (1 + np.vectorize(erf)(inner / sqrt(2)))
        x = norm(x + linear(inner, f"{p}output.dense"), f"{p}output.LayerNorm")
    if "classifier.weight" in w:
        return linear(np.tanh(linear(x[:1], "pooler.dense")), "classifier")[0]
    mean = x.mean(axis=0)
    return mean / np.linalg.norm(mean)
