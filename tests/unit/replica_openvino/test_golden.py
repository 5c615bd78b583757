"""Compares the engine with `reference_logits`, for every supported kind of checkpoint."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from replica.engine.quantized import quantize_base
from replica.engine.safetensors import BFLOAT16, read_safetensors, write_safetensors
from tests.support.random_models import write_random_model

PROMPT = [random.Random(7).randrange(3, 470) for _ in range(150)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 40}


def check(directory: Path, load, make_request, record_logits, reference_logits, **options) -> None:
    """Compute two prompts in one batch, in chunks of 48 tokens, and 4 new tokens each."""
    engine = load(directory=directory, step_tokens_max=48, sequences_max=8, **options)
    logits = record_logits(engine)
    prompts = {1: PROMPT, 2: PROMPT[20:60]}
    for key, prompt in prompts.items():
        engine.add(make_request(key, prompt, 4))
    rows: dict[int, list[np.ndarray]] = {1: [], 2: []}
    tokens: dict[int, list[int]] = {1: [], 2: []}
    while engine.has_work:
        before = len(logits)
        events = engine.step()
        for row, key in enumerate(events.keys):
            rows[key].append(logits[before][row])
            tokens[key].append(events.tokens[row])
    for key, prompt in prompts.items():
        assert len(tokens[key]) == 4
        wanted = reference_logits(directory, prompt + tokens[key])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(rows[key], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 40}),
        ("mistral", {"sliding_window": 7, "tie_word_embeddings": False}),
        ("qwen2", {}),
        ("qwen2", {**QWEN_WINDOW, "max_window_layers": 1}),
        ("qwen3", {}),
        ("qwen3", {**QWEN_WINDOW, "max_window_layers": 0}),
    ],
    ids=str,
)
def test_logits_equal_the_reference(
    tmp_path: Path, architecture, changes, load, make_request, record_logits, reference_logits
) -> None:
    write_random_model(tmp_path, 3, architecture=architecture, changes=changes)
    check(tmp_path, load, make_request, record_logits, reference_logits)


def store_as(directory: Path, convert) -> None:
    tensors = read_safetensors(directory / "model.safetensors")
    write_safetensors(
        directory / "model.safetensors", {name: convert(array) for name, array in tensors.items()}
    )


def to_bf16(array: np.ndarray) -> np.ndarray:
    return (array.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)


@pytest.mark.parametrize("convert", [to_bf16, lambda array: array.astype(np.float16)])
def test_half_precision_checkpoints(
    tmp_path: Path, convert, load, make_request, record_logits, reference_logits
) -> None:
    write_random_model(tmp_path, architecture="qwen2")
    store_as(tmp_path, convert)
    check(tmp_path, load, make_request, record_logits, reference_logits)


@pytest.mark.parametrize("is_tied", [True, False])
def test_int8_checkpoints(
    tmp_path: Path, is_tied, load, make_request, record_logits, reference_logits
) -> None:
    write_random_model(tmp_path / "f32", changes={"tie_word_embeddings": is_tied})
    quantize_base(tmp_path / "f32", tmp_path / "i8")
    check(tmp_path / "i8", load, make_request, record_logits, reference_logits)


def test_sharded_checkpoints(
    tmp_path: Path, load, make_request, record_logits, reference_logits
) -> None:
    write_random_model(tmp_path)
    single = tmp_path / "model.safetensors"
    tensors = read_safetensors(single)
    listed: dict[str, str] = {}
    for index in range(3):
        names = sorted(tensors)[index::3]
        file = f"model-0000{index + 1}-of-00003.safetensors"
        write_safetensors(tmp_path / file, {name: tensors[name] for name in names})
        listed |= dict.fromkeys(names, file)
    single.unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    check(tmp_path, load, make_request, record_logits, reference_logits)
