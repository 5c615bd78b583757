import json
from pathlib import Path

import pytest

from replica.engine.artifact import ArtifactError, ordinary_token_ids, read_base_facts
from replica.engine.llama import LlamaConfig, check_tensors


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def test_the_test_model_is_served(model_dir: Path) -> None:
    config = LlamaConfig.of(config_of(model_dir))
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 2, 32)
    check_tensors(config, config.weight_shapes())


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"sliding_window": 4096},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"quantization_config": {"bits": 4}},
        {"num_local_experts": 8},
        {"a_field_of_next_year": 0.5},
        {"hidden_size": None},
    ],
)
def test_what_the_graph_does_not_compute_is_refused_by_name(model_dir: Path, change: dict) -> None:
    (name,) = change
    with pytest.raises(ArtifactError, match=name):
        LlamaConfig.of({**config_of(model_dir), **change})


def test_new_style_rope_parameters_are_read(model_dir: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert LlamaConfig.of({**config_of(model_dir), "rope_parameters": rope}).rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model.layers.0.self_attn.q_proj.bias": (128,)}, "also holds .*q_proj.bias"),
        ({"model.norm.weight": None}, "lacks model.norm.weight"),
        ({"model.norm.weight": (65,)}, r"has model.norm.weight \(65,\)"),
    ],
)
def test_tensors_must_be_those_of_the_config(model_dir: Path, change: dict, text: str) -> None:
    config = LlamaConfig.of(config_of(model_dir))
    shapes = {**config.weight_shapes(), **change}
    with pytest.raises(ArtifactError, match=text):
        check_tensors(config, {name: shape for name, shape in shapes.items() if shape is not None})


def test_a_tied_head_may_be_stored_too(model_dir: Path) -> None:
    config = LlamaConfig.of(config_of(model_dir))
    check_tensors(config, {**config.weight_shapes(), "lm_head.weight": (1, 1)})


def test_base_facts_join_both_files(model_dir: Path) -> None:
    facts = read_base_facts(model_dir)
    assert facts.context_tokens == 2048
    assert facts.eos_ids == {0, 2}


@pytest.mark.parametrize(
    ("text", "problem"),
    [(None, "is missing"), ("{", "not JSON"), ("[]", "not a JSON object"), ("{}", "vocab_size")],
)
def test_a_broken_config_is_named(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArtifactError, match=problem):
        read_base_facts(tmp_path)


def test_ordinary_tokens_are_words_and_never_special(model_dir: Path) -> None:
    vocabulary = read_base_facts(model_dir).vocabulary
    ids = ordinary_token_ids(model_dir, vocabulary)
    entries = json.loads((model_dir / "tokenizer.json").read_bytes())["model"]["vocab"]
    texts = {index: text for text, index in entries.items()}
    assert len(ids) > 100
    assert not {0, 1, 2} & set(ids)
    assert all(texts[index].removeprefix("Ġ").isalpha() for index in ids)


def test_without_a_tokenizer_there_are_ordinary_tokens_too(tmp_path: Path) -> None:
    assert ordinary_token_ids(tmp_path, 160) == list(range(10, 160))
