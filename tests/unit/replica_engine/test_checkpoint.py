import json
from pathlib import Path

import numpy as np
import pytest

from replica.engine.architectures import ModelConfig
from replica.engine.artifact import ArtifactError
from replica.engine.checkpoint import Weight, check_shapes, join_scales, read_checkpoint
from replica.engine.graph import read_base
from replica.engine.quantized import quantize_base, quantize_rows
from replica.engine.safetensors import BFLOAT16, read_safetensors, write_safetensors
from tests.support.random_models import write_random_model

ONES = np.ones((2, 3), np.float32)


def write_shards(directory: Path, listed: dict, **shards: dict[str, np.ndarray]) -> None:
    for name, tensors in shards.items():
        write_safetensors(directory / f"{name}.safetensors", tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def test_shards_are_joined(tmp_path: Path) -> None:
    listed = {"a": "one.safetensors", "b": "two.safetensors"}
    write_shards(tmp_path, listed, one={"a": ONES}, two={"b": ONES * 2, "c": ONES * 3})
    read = read_checkpoint(tmp_path)
    assert {name: array[0, 0] for name, array in read.items()} == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("listed", "text"),
    [
        ({"a": "gone.safetensors"}, "gone.safetensors is missing"),
        ({"a": "../one.safetensors"}, "no safetensors file beside it"),
        ({"a": "one.bin"}, "no safetensors file beside it"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "two.safetensors holds a again"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, listed, text: str) -> None:
    write_shards(tmp_path, listed, one={"a": ONES}, two={"a": ONES})
    with pytest.raises(ArtifactError, match=text):
        read_checkpoint(tmp_path)


def test_a_base_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match="holds neither"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(ArtifactError, match="import the base anew"):
        read_checkpoint(tmp_path)


def test_tables_that_follow_from_the_config_are_skipped(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_safetensors(tmp_path / "model.safetensors", {"a": ONES, name: np.ones(4, np.float64)})
    assert set(read_checkpoint(tmp_path)) == {"a"}


def test_bf16_stays_as_it_is_stored(tmp_path: Path) -> None:
    bits = (ONES.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)
    write_safetensors(tmp_path / "model.safetensors", {"a": bits})
    (weight,) = join_scales(read_checkpoint(tmp_path)).values()
    assert weight.values.dtype == BFLOAT16
    assert weight.values.nbytes == 12
    assert np.array_equal(weight.as_float32(), ONES)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scales_belong_to_their_matrix(shape: tuple[int, ...], dtype) -> None:
    values = np.array([[1, -2], [3, 4]], np.int8)
    scale = np.array([0.5, 2], dtype).reshape(shape)
    (weight,) = join_scales({"a.weight": values, "a.weight_scale": scale}).values()
    assert np.array_equal(weight.as_float32(), [[0.5, -1], [6, 8]])


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"w": ONES.astype(np.int8)}, "w is I8 .* without a float w_scale"),
        ({"w": ONES.astype(np.int8), "w_scale": np.ones(3, np.float32)}, "without a float w_scale"),
        ({"w": ONES.astype(np.int8), "w_scale": np.ones(2, np.int8)}, "without a float w_scale"),
        ({"w": np.ones(2, np.int8), "w_scale": np.ones(2, np.float32)}, "without a float w_scale"),
        ({"w": ONES.astype(np.float64)}, "w is float64"),
        ({"w": ONES.astype(np.int32)}, "w is int32"),
    ],
)
def test_types_that_are_not_computed_are_refused(tensors: dict, text: str) -> None:
    with pytest.raises(ArtifactError, match=text):
        join_scales(tensors)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model.layers.0.self_attn.q_proj.bias": (128,)}, "also holds .*q_proj.bias"),
        ({"model.layers.0.self_attn.q_proj.weight_zero_point": (128,)}, "also holds .*zero_point"),
        ({"model.norm.weight": None}, "lacks model.norm.weight"),
        ({"model.norm.weight": (65,)}, r"has model.norm.weight \(65,\) instead of \(64,\)"),
        # the output matrix is the input matrix, so a stored one is not used
        ({"lm_head.weight": (1, 1)}, ""),
    ],
)
def test_tensors_must_match_the_config(model_dir: Path, change: dict, text: str) -> None:
    config = ModelConfig.of(json.loads((model_dir / "config.json").read_text()))
    shapes = {name: s for name, s in {**config.weight_shapes(), **change}.items() if s}
    weights = {name: Weight(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
    if not text:
        check_shapes(weights, config.weight_shapes(), frozenset({"lm_head.weight"}))
        return
    with pytest.raises(ArtifactError, match=text):
        check_shapes(weights, config.weight_shapes(), frozenset())


def test_quantised_rows_are_as_near_as_eight_bits_allow() -> None:
    matrix = np.random.default_rng(0).standard_normal((50, 30)).astype(np.float32)
    matrix[7] = 0
    values, scale = quantize_rows(matrix)
    assert values.dtype == np.int8
    assert np.abs(values).max(axis=1).tolist() == [127 if row != 7 else 0 for row in range(50)]
    assert (np.abs(values * scale[:, None] - matrix) <= scale[:, None] / 2 + 1e-7).all()


def test_a_quantised_base_keeps_everything_but_its_matrices(tmp_path: Path) -> None:
    write_random_model(tmp_path / "a", architecture="qwen2")
    quantize_base(tmp_path / "a", tmp_path / "b")
    before = read_safetensors(tmp_path / "a" / "model.safetensors")
    after = read_base(tmp_path / "b").weights
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert after[name].values.dtype == (np.int8 if array.ndim == 2 else np.float32)
        assert np.abs(after[name].as_float32() - array).max() < 0.01
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {path.name for path in (tmp_path / "b").iterdir()} == names
    quantize_base(tmp_path / "b", tmp_path / "c")  # a quantised base stays unchanged
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()
