"""Defines the engine under test, and an independent reference of the models.

`reference_logits` uses the engine's reader of safetensors, but no other part of the engine. It
computes one sequence in numpy and float64, with loops and without a cache.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replica.drivers.openvino import load_openvino
from replica.engine.core import ScheduledEngine
from replica.engine.plan import StepOutput, StepPlan
from replica.engine.safetensors import read_safetensors
from replica.engine.sampler import Sampler
from replica.engine.types import FinishedEvent, SequenceRequest, StepEvents
from sluice.hashing import cache_root
from tests.support.random_models import write_random_adapter, write_random_model

ADAPTERS = 5
BASE = "base"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_random_model(directory)
    return directory


@pytest.fixture(scope="session")
def adapter_dirs(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, Path]:
    """Digest -> directory of adapters with the ranks 4, 8, 12, 16 and 4."""
    root = tmp_path_factory.mktemp("adapters")
    made = {}
    for index in range(ADAPTERS):
        digest = f"adapter-{index}"
        write_random_adapter(root / digest, model_dir, index, rank=4 + 4 * (index % 4))
        made[digest] = root / digest
    return made


class Outcome:
    """The outputs and ends of an engine's sequences."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishedEvent] = {}
        self.cached: dict[int, int] = {}

    def note(self, events: StepEvents) -> None:
        for key, token in zip(events.keys, events.tokens, strict=True):
            self.tokens.setdefault(key, []).append(token)
        for event in events.finished:
            assert event.key not in self.finished
            self.finished[event.key] = event
        for event in events.admitted:
            self.cached[event.key] = event.cached_tokens


def run(engine: ScheduledEngine, *requests: SequenceRequest) -> Outcome:
    for request in requests:
        engine.add(request)
    outcome = Outcome()
    for _ in range(5000):
        if not engine.has_work:
            return outcome
        outcome.note(engine.step())
    raise AssertionError(f"stands still: {engine.load()}")


@pytest.fixture(scope="session")
def run_all() -> Callable[..., Outcome]:
    return run


@pytest.fixture(scope="session")
def make_request() -> Callable[..., SequenceRequest]:
    """Make a request whose cache root depends on its adapter, like a gateway's request."""

    def make(key: int, prompt: list[int], count: int, adapter: str = "", **more) -> SequenceRequest:
        return SequenceRequest(
            key,
            prompt,
            count,
            ignore_eos=True,
            adapter_digest=adapter,
            cache_root=cache_root(BASE, adapter, b""),
            **more,
        )

    return make


@pytest.fixture(scope="session")
def load(model_dir: Path, adapter_dirs: dict[str, Path]) -> Callable[..., ScheduledEngine]:
    """Load a deterministic engine (f32) with the test model, and with adapters if requested."""

    def make(*digests: str, directory: Path = model_dir, **options) -> ScheduledEngine:
        engine = load_openvino(directory, BASE, {"precision": "f32", "blocks": 64, **options})
        for digest in digests:
            engine.put_adapter(digest, engine.read_adapter(digest, adapter_dirs[digest]))
        return engine

    return make


class RecordingSampler(Sampler):
    """A sampler that stores the logits of every step."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary, frozenset())
        self.logits: list[np.ndarray] = []

    def sample(self, logits: np.ndarray, plan: StepPlan) -> StepOutput:
        self.logits.append(logits.copy())
        return super().sample(logits, plan)


@pytest.fixture(scope="session")
def record_logits() -> Callable[[ScheduledEngine], list[np.ndarray]]:
    """Return a list of logits that grows by one array [rows, vocabulary] per sampling step."""

    def record(engine: ScheduledEngine) -> list[np.ndarray]:
        sampler = RecordingSampler(engine.limits.vocabulary)
        engine._backend._sampler = sampler
        return sampler.logits

    return record


def read_weights(directory: Path) -> dict[str, np.ndarray]:
    weights = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights.update(read_safetensors(path))
    for name in [name for name in weights if name.endswith("_scale")]:
        scale = weights.pop(name).reshape(-1, 1)
        weights[name.removesuffix("_scale")] = weights[name.removesuffix("_scale")] * scale
    return {name: array.astype(np.float64) for name, array in weights.items()}


def merge(weights: dict[str, np.ndarray], adapter: Path) -> dict[str, np.ndarray]:
    """Return the weights W + BA * scaling."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    merged = dict(weights)
    for name, down in read_safetensors(adapter / "adapter_model.safetensors").items():
        if ".lora_A." not in name:
            continue
        up = read_safetensors(adapter / "adapter_model.safetensors")[
            name.replace(".lora_A.", ".lora_B.")
        ]
        rank = len(down)
        scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        merged[target] = weights[target] + scaling * (up.astype(float) @ down.astype(float))
    return merged


def _norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def _frequency(config: dict, pair: int, dim: int) -> float:
    plain = config["rope_theta"] ** (-2 * pair / dim)
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    if scaling["rope_type"] == "default":
        return plain
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"]
    wave = 2 * math.pi / plain
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wave < original / high:
        return plain
    if wave > original / low:
        return plain / scaling["factor"]
    smooth = (original / wave - low) / (high - low)
    return (1 - smooth) * plain / scaling["factor"] + smooth * plain


def _rotate(config: dict, x: np.ndarray) -> np.ndarray:
    """Rotate [tokens, heads, dim], where pair i is (i, i + dim / 2)."""
    tokens, _, dim = x.shape
    out = x.copy()
    for pair in range(dim // 2):
        angle = np.arange(tokens)[:, None] * _frequency(config, pair, dim)
        low, high = x[:, :, pair], x[:, :, pair + dim // 2]
        out[:, :, pair] = low * np.cos(angle) - high * np.sin(angle)
        out[:, :, pair + dim // 2] = high * np.cos(angle) + low * np.sin(angle)
    return out


def _window(config: dict, layer: int) -> int:
    window = config.get("sliding_window") or 0
    if "use_sliding_window" not in config:
        return window
    is_sliding = config["use_sliding_window"] and layer >= config.get("max_window_layers", 0)
    return window if is_sliding else 0


def _attention(config: dict, weights: dict, layer: int, x: np.ndarray) -> np.ndarray:
    prefix = f"model.layers.{layer}.self_attn."
    heads, kv_heads, dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    parts = {}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        y = x @ weights[f"{prefix}{name}_proj.weight"].T
        y = y + weights.get(f"{prefix}{name}_proj.bias", 0.0)
        y = y.reshape(len(x), count, dim)
        if name != "v":
            if f"{prefix}{name}_norm.weight" in weights:
                y = _norm(y, weights[f"{prefix}{name}_norm.weight"], config["rms_norm_eps"])
            y = _rotate(config, y)
        parts[name] = y
    window = _window(config, layer)
    out = np.zeros((len(x), heads, dim))
    for head in range(heads):
        group = head // (heads // kv_heads)
        for token in range(len(x)):
            first = max(0, token - window + 1) if window else 0
            keys = parts["k"][first : token + 1, group]
            scores = keys @ parts["q"][token, head] / math.sqrt(dim)
            shares = np.exp(scores - scores.max())
            out[token, head] = shares / shares.sum() @ parts["v"][first : token + 1, group]
    return out.reshape(len(x), -1) @ weights[f"{prefix}o_proj.weight"].T


def logits_of(directory: Path, tokens: list[int], adapter: Path | None = None) -> np.ndarray:
    """Return the logits [tokens, vocabulary] in float64."""
    config = json.loads((directory / "config.json").read_text())
    weights = read_weights(directory)
    if adapter is not None:
        weights = merge(weights, adapter)
    epsilon = config["rms_norm_eps"]
    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        x = _norm(hidden, weights[prefix + "input_layernorm.weight"], epsilon)
        hidden = hidden + _attention(config, weights, layer, x)
        x = _norm(hidden, weights[prefix + "post_attention_layernorm.weight"], epsilon)
        gate = x @ weights[prefix + "mlp.gate_proj.weight"].T
        gate = gate / (1 + np.exp(-gate))
        up = x @ weights[prefix + "mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ weights[prefix + "mlp.down_proj.weight"].T
    hidden = _norm(hidden, weights["model.norm.weight"], epsilon)
    is_tied = config["tie_word_embeddings"]
    return hidden @ weights["model.embed_tokens.weight" if is_tied else "lm_head.weight"].T


@pytest.fixture(scope="session")
def reference_logits() -> Callable[..., np.ndarray]:
    return logits_of
