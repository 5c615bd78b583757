import json
import os
from pathlib import Path

import numpy as np
import pytest

from replica.engine.architectures import PROJECTIONS, ModelConfig
from replica.engine.lora import LoraAdapter, read_adapter
from replica.engine.safetensors import BFLOAT16, read_safetensors, write_safetensors
from replica.engine.types import RefusedError
from sluice.errors import ErrorCode
from tests.support.random_models import write_random_adapter

DIGEST = "d1ge57" * 4
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.fixture
def config(model_dir: Path) -> ModelConfig:
    return ModelConfig.of(json.loads((model_dir / "config.json").read_text()))


@pytest.fixture
def adapter_dir(tmp_path: Path, model_dir: Path) -> Path:
    write_random_adapter(tmp_path / "adapter", model_dir, rank=4)
    return tmp_path / "adapter"


def edit_config(directory: Path, **changes) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Add or replace tensors. None removes a tensor."""
    path = directory / "adapter_model.safetensors"
    tensors = {name: array.copy() for name, array in read_safetensors(path).items()}
    tensors.update({name: array for name, array in changes.items() if array is not None})
    for name in [name for name, array in changes.items() if array is None]:
        del tensors[name]
    write_safetensors(path, tensors)


def read(directory: Path, config: ModelConfig, rank_max: int = 16) -> LoraAdapter:
    return read_adapter(DIGEST, directory, config, rank_max)


def refuse(directory: Path, config: ModelConfig, text: str, rank_max: int = 16) -> None:
    with pytest.raises(RefusedError, match=text) as caught:
        read(directory, config, rank_max)
    assert caught.value.code is ErrorCode.ADAPTER_INVALID
    assert DIGEST[:12] in caught.value.message


def test_all_projections_are_read_and_scaled(adapter_dir: Path, config: ModelConfig) -> None:
    adapter = read(adapter_dir, config)
    tensors = read_safetensors(adapter_dir / "adapter_model.safetensors")
    assert adapter.rank == 4
    assert set(adapter.deltas) == {(layer, name) for layer in range(2) for name in PROJECTIONS}
    delta = adapter.deltas[0, "self_attn.q_proj"]
    assert np.array_equal(delta.down, tensors[Q0 + "A.weight"])
    # alpha is twice the rank, so the factor is 2
    assert np.allclose(delta.up, tensors[Q0 + "B.weight"].T * 2)
    total = sum(delta.down.nbytes + delta.up.nbytes for delta in adapter.deltas.values())
    assert adapter.memory_bytes == total


def test_the_file_may_go_once_it_is_read(adapter_dir: Path, config: ModelConfig) -> None:
    adapter = read(adapter_dir, config)
    for delta in adapter.deltas.values():
        for array in (delta.down, delta.up):
            assert array.flags.owndata or not isinstance(array.base, np.memmap)
            assert not np.shares_memory(
                array, read_safetensors(adapter_dir / "adapter_model.safetensors")[Q0 + "A.weight"]
            )


def up_of(directory: Path, config: ModelConfig, layer: int = 0) -> np.ndarray:
    return read(directory, config).deltas[layer, "self_attn.q_proj"].up


def test_scalings(adapter_dir: Path, config: ModelConfig) -> None:
    plain = up_of(adapter_dir, config)  # alpha 8 and rank 4 give the factor 2
    edit_config(adapter_dir, use_rslora=True)
    assert np.allclose(up_of(adapter_dir, config), plain * 2)  # the factor is 8 / sqrt(4)
    edit_config(adapter_dir, use_rslora=False, alpha_pattern={"layers.0.self_attn.q_proj": 2})
    assert np.allclose(up_of(adapter_dir, config), plain / 4)
    assert np.allclose(
        up_of(adapter_dir, config, 1), read(adapter_dir, config).deltas[1, "self_attn.q_proj"].up
    )
    edit_config(adapter_dir, alpha_pattern={"q_proj": 4.0})
    assert np.allclose(up_of(adapter_dir, config), plain / 2)


def test_ranks_may_differ_by_module(adapter_dir: Path, config: ModelConfig) -> None:
    down, up = np.ones((2, 64), np.float32), np.ones((128, 2), np.float32)
    edit_tensors(adapter_dir, {Q0 + "A.weight": down, Q0 + "B.weight": up})
    refuse(adapter_dir, config, r"q_proj is \[2, 64\]; this base and rank need \[4, 64\]")
    edit_config(adapter_dir, rank_pattern={"layers.0.self_attn.q_proj": 2})
    adapter = read(adapter_dir, config)
    assert adapter.rank == 4
    # alpha 8 and rank 2 give the factor 4
    assert np.array_equal(adapter.deltas[0, "self_attn.q_proj"].up, up.T * 4)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
def test_half_precision_is_widened(adapter_dir: Path, config: ModelConfig, dtype) -> None:
    path = adapter_dir / "adapter_model.safetensors"
    tensors = {name: array.copy() for name, array in read_safetensors(path).items()}
    if dtype == BFLOAT16:
        halves = {
            name: (array.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)
            for name, array in tensors.items()
        }
    else:
        halves = {name: array.astype(dtype) for name, array in tensors.items()}
    write_safetensors(path, halves)
    delta = read(adapter_dir, config).deltas[0, "self_attn.q_proj"]
    assert delta.down.dtype == np.float32
    assert np.allclose(delta.down, tensors[Q0 + "A.weight"], rtol=0.01)


@pytest.mark.parametrize(
    ("targets", "changes"),
    [
        (["self_attn.q_proj", "self_attn.v_proj"], {}),
        (PROJECTIONS, {"target_modules": "all-linear"}),
        (
            ["mlp.up_proj"],
            {"target_modules": ["up_proj", "down_proj"], "exclude_modules": ["down_proj"]},
        ),
        (["self_attn.q_proj"], {"target_modules": ["self_attn.q_proj"]}),
    ],
)
def test_adapters_of_some_modules(
    tmp_path: Path, model_dir: Path, config: ModelConfig, targets, changes
) -> None:
    write_random_adapter(tmp_path, model_dir, targets=targets, changes=changes)
    assert set(read(tmp_path, config).deltas) == {(layer, t) for layer in range(2) for t in targets}


def test_adapters_of_some_layers(adapter_dir: Path, config: ModelConfig) -> None:
    tensors = read_safetensors(adapter_dir / "adapter_model.safetensors")
    edit_tensors(adapter_dir, {name: None for name in tensors if ".layers.0." in name})
    refuse(adapter_dir, config, r"lacks layer 0 mlp.down_proj \(7 in all\)")
    edit_config(adapter_dir, layers_to_transform=[1])
    assert {layer for layer, _ in read(adapter_dir, config).deltas} == {1}


@pytest.mark.parametrize("layers", [1.5, "0", {"0": 1}, [0, "1"], [None]])
def test_layers_are_numbers(adapter_dir: Path, config: ModelConfig, layers: object) -> None:
    edit_config(adapter_dir, layers_to_transform=layers)
    refuse(adapter_dir, config, "layers_to_transform is .*numbers of layers")


@pytest.mark.parametrize(
    "harmless",
    [
        {"revision": None, "auto_mapping": None, "inference_mode": True, "lora_dropout": 0.1},
        {"loftq_config": {}, "modules_to_save": [], "megatron_core": "megatron.core"},
        {"use_dora": False, "lora_bias": False, "trainable_token_indices": None},
        {"qalora_group_size": 16, "use_qalora": False, "init_lora_weights": True},
        {"init_lora_weights": "gaussian", "peft_version": "0.21.2"},
    ],
)
def test_irrelevant_options_are_accepted(
    adapter_dir: Path, config: ModelConfig, harmless: dict
) -> None:
    edit_config(adapter_dir, **harmless)
    read(adapter_dir, config)


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "LOHA"},
        {"peft_type": None},
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 2]]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["mlp.experts"]},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": 1},
        {"fan_in_fan_out": True},
        {"a_field_of_next_year": 0.5},
        {"r": 0},
        {"r": True},
        {"r": "8"},
        {"lora_alpha": None},
        {"lora_alpha": float("nan")},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": {".*q_proj": 4}},
        {"alpha_pattern": {"q_proj": "x"}},
        {"alpha_pattern": [1]},
        {"target_modules": None},
        {"target_modules": []},
        {"target_modules": ".*q_proj"},
        {"target_modules": ["q_proj", "gate"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": [7]},
    ],
    ids=str,
)
def test_uncomputed_options_are_refused_by_name(
    adapter_dir: Path, config: ModelConfig, change: dict
) -> None:
    (name,) = change
    name = "lora_alpha" if name == "alpha_pattern" and change[name] != [1] else name
    edit_config(adapter_dir, **change)
    refuse(adapter_dir, config, name)


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        (Q0 + "A.weight", None, "only one of lora_A and lora_B"),
        (Q0 + "magnitude_vector", np.ones(4, np.float32), "magnitude_vector"),
        (Q0 + "B.bias", np.ones(4, np.float32), "lora_B.bias"),
        (Q0 + "A.weight", np.ones((4, 63), np.float32), r"\[4, 63\].*\[4, 64\]"),
        (Q0 + "B.weight", np.ones((4, 128), np.float32), r"\[4, 128\].*\[128, 4\]"),
        (Q0 + "A.weight", np.ones((4, 64, 1), np.float32), r"\[4, 64, 1\]"),
        (Q0 + "A.weight", np.ones((4, 64), np.float64), "float64"),
        (Q0 + "A.weight", np.ones((4, 64), np.int8), "int8"),
        (Q0 + "A.weight", np.full((4, 64), np.nan, np.float32), "not finite"),
        (Q0 + "B.weight", np.full((128, 4), np.inf, np.float32), "not finite"),
        (Q0 + "B.weight", np.full((128, 4), 3e38, np.float32), "overflows"),
        ("base_model.model.lm_head.lora_A.weight", np.ones((4, 64), np.float32), "lm_head"),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            np.ones((4, 9), np.float32),
            "embed_tokens",
        ),
        (
            "base_model.model.model.layers.2.mlp.up_proj.lora_A.weight",
            np.ones((4, 64), np.float32),
            "layers.2.*the base has 2 layers",
        ),
        ("something_else", np.ones(1, np.float32), "something_else"),
    ],
)
def test_tensors_that_do_not_belong_are_refused(
    adapter_dir: Path, config: ModelConfig, name: str, array, text: str
) -> None:
    edit_tensors(adapter_dir, {name: array})
    refuse(adapter_dir, config, text)


def test_a_rank_above_the_slots_is_refused_with_both(
    adapter_dir: Path, config: ModelConfig
) -> None:
    refuse(adapter_dir, config, "r is 4; this engine serves ranks 1 to 3", rank_max=3)


def test_more_modules_than_announced_are_refused(adapter_dir: Path, config: ModelConfig) -> None:
    edit_config(adapter_dir, target_modules=["q_proj"])
    refuse(adapter_dir, config, r"also holds layer 0 mlp.down_proj \(12 in all\)")


def test_an_adapter_without_tensors_is_refused(adapter_dir: Path, config: ModelConfig) -> None:
    write_safetensors(adapter_dir / "adapter_model.safetensors", {})
    refuse(adapter_dir, config, "holds no tensors")


def test_pickled_weights_are_never_read(adapter_dir: Path, config: ModelConfig) -> None:
    (adapter_dir / "adapter_model.safetensors").rename(adapter_dir / "adapter_model.bin")
    refuse(adapter_dir, config, "save the adapter as safetensors")


def test_broken_files_are_refused(adapter_dir: Path, config: ModelConfig) -> None:
    (adapter_dir / "adapter_model.safetensors").write_bytes(b"PK\3\4 pickle")
    refuse(adapter_dir, config, "does not fit into the file")
    (adapter_dir / "adapter_config.json").unlink()
    refuse(adapter_dir, config, "adapter_config.json is missing")


def test_a_file_too_large_for_an_adapter_is_not_read(
    adapter_dir: Path, config: ModelConfig
) -> None:
    weights = adapter_dir / "adapter_model.safetensors"
    os.truncate(weights, 1 << 40)  # a sparse file
    refuse(adapter_dir, config, f"has {1 << 40} bytes; at most")
    header = b'{"__metadata__":{}}' + b" " * (5 << 20)
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    refuse(adapter_dir, config, "adapter_model.safetensors has|more than the 4194304 bytes")
    (adapter_dir / "adapter_config.json").write_bytes(b"[" * 100_000)
    refuse(adapter_dir, config, "is not JSON")
    os.truncate(adapter_dir / "adapter_config.json", 1 << 40)
    refuse(adapter_dir, config, f"adapter_config.json has {1 << 40} bytes")


def test_a_disk_that_fails_says_nothing_about_the_adapter(
    adapter_dir: Path, config: ModelConfig
) -> None:
    (adapter_dir / "adapter_model.safetensors").unlink()
    (adapter_dir / "adapter_model.safetensors").mkdir()  # a directory cannot be opened as a file
    with pytest.raises(OSError, match="directory"):
        read(adapter_dir, config)


def test_a_missing_directory_is_not_found(tmp_path: Path, config: ModelConfig) -> None:
    with pytest.raises(RefusedError, match="not on this node") as caught:
        read(tmp_path / "nothing", config)
    assert caught.value.code is ErrorCode.ADAPTER_NOT_FOUND
