import json
from pathlib import Path

import pytest

from replica.engine.architectures import ARCHITECTURES, ModelConfig
from replica.engine.artifact import ArtifactError, ordinary_token_ids, read_base_facts

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
                "observer": "minmax",
            },
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
        }
    },
}


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def test_the_test_model_is_served(model_dir: Path) -> None:
    config = ModelConfig.of(config_of(model_dir))
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 2, 32)
    assert config.windows == (0, 0)
    assert not config.has_qkv_bias
    assert not config.has_qk_norm


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"model_type": "mixtral"},
        {"model_type": None},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"sliding_window": 4096},  # Llama has no sliding window
        {"use_sliding_window": True},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "attention_factor": 2}},
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 0.5},
        {"quantization_config": {"bits": 4}},
        {"quantization_config": {**INT8, "format": "pack-quantized"}},
        {"quantization_config": {**INT8, "config_groups": {}}},
        {"quantization_config": {**INT8, "kv_cache_scheme": {"num_bits": 8}}},
        {"num_local_experts": 8},
        {"a_field_of_next_year": 0.5},
        {"hidden_size": None},
        {"num_key_value_heads": 3},
        {"head_dim": 31},
    ],
)
def test_an_architecture_the_graph_does_not_compute_is_refused_by_name(
    model_dir: Path, change: dict
) -> None:
    (name,) = change
    with pytest.raises(ArtifactError, match=name) as caught:
        ModelConfig.of({**config_of(model_dir), **change})
    assert all(supported in str(caught.value) for supported in ARCHITECTURES)


@pytest.mark.parametrize("size", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [0, -1, "many"])
def test_impossible_sizes_are_refused(model_dir: Path, size: str, value: object) -> None:
    with pytest.raises(ArtifactError, match="cannot serve"):
        ModelConfig.of({**config_of(model_dir), size: value})


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("mistral", "sliding_window"),
        ("mistral", "num_key_value_heads"),
        ("qwen2", "num_key_value_heads"),
        ("qwen3", "head_dim"),
    ],
)
def test_a_field_with_defaults_that_differ_between_families_is_required(
    model_dir: Path, kind: str, field: str
) -> None:
    config = {**config_of(model_dir), "model_type": kind, "sliding_window": None}
    ModelConfig.of(config)
    del config[field]
    with pytest.raises(ArtifactError, match=field):
        ModelConfig.of(config)


@pytest.mark.parametrize(
    ("kind", "fields", "windows"),
    [
        ("mistral", {"sliding_window": None}, (0, 0)),
        ("mistral", {"sliding_window": 64}, (64, 64)),
        ("qwen2", {"sliding_window": 64}, (0, 0)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, (0, 0)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, (64, 64)),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            (0, 64),
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (64, 0),
        ),
    ],
)
def test_sliding_windows_per_layer(
    model_dir: Path, kind: str, fields: dict, windows: tuple[int, ...]
) -> None:
    config = {**config_of(model_dir), "model_type": kind, **fields}
    assert ModelConfig.of(config).windows == windows


def test_qwen_has_biases_and_norms(model_dir: Path) -> None:
    config = config_of(model_dir)
    qwen2 = ModelConfig.of({**config, "model_type": "qwen2"}).weight_shapes()
    assert qwen2["model.layers.1.self_attn.k_proj.bias"] == (64,)
    assert "model.layers.1.self_attn.o_proj.bias" not in qwen2
    qwen3 = ModelConfig.of({**config, "model_type": "qwen3"}).weight_shapes()
    assert qwen3["model.layers.1.self_attn.q_norm.weight"] == (32,)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ],
)
def test_all_spellings_of_plain_rotary_positions(model_dir: Path, rope: dict) -> None:
    config = config_of(model_dir)
    assert ModelConfig.of({**config, **rope}).rope == ModelConfig.of(config).rope


def test_new_style_rope_parameters_are_read(model_dir: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert ModelConfig.of({**config_of(model_dir), "rope_parameters": rope}).rope.theta == 5e5
    old = ModelConfig.of({**config_of(model_dir), "rope_theta": 5e5, "rope_scaling": LLAMA3}).rope
    new = ModelConfig.of(
        {**config_of(model_dir), "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    ).rope
    assert old == new
    assert (old.kind, old.factor, old.original_context_tokens) == ("llama3", 8.0, 256)


def test_a_quantised_checkpoint_of_a_known_kind_is_served(model_dir: Path) -> None:
    ModelConfig.of({**config_of(model_dir), "quantization_config": INT8})


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
