"""Adapters: what is accepted is what the engine takes, and every refusal says what to do."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.artifacts.adapter_check import AdapterLimits, check_adapter
from replica.engine.architectures import PROJECTIONS, ModelConfig
from replica.engine.lora import read_adapter
from replica.engine.safetensors import read_safetensors, write_safetensors
from replica.engine.types import RefusedError
from tests.support.random_models import write_random_adapter

ROOT = Path(__file__).parents[4]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
LIMITS = AdapterLimits(rank_max=16)


def edit_config(directory: Path, **changes) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory: Path, changes: dict) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = {name: array.copy() for name, array in read_safetensors(path).items()} | changes
    write_safetensors(path, {name: array for name, array in tensors.items() if array is not None})


def test_the_adapters_that_ship_are_accepted(sources) -> None:
    config = json.loads((ROOT / "model_repo/default/config.json").read_text())
    adapters = [path for path in (ROOT / "model_repo/adapters").iterdir() if path.is_dir()]
    assert adapters
    for directory in adapters:
        assert check_adapter(sources(directory), config, AdapterLimits()) == []


def test_only_the_header_of_the_tensors_is_read(adapter_dir, base_config, sources) -> None:
    files = sources(adapter_dir)
    assert check_adapter(files, base_config, LIMITS) == []
    tensors = files["adapter_model.safetensors"]
    header = int.from_bytes(tensors.content[:8], "little")
    assert tensors.reads == [(0, 8), (8, header)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"r": 17}, "r is 17, ranks from 1 to 16 are served: train"),
        ({"r": True}, "r is True"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1"),
        ({"peft_type": "IA3"}, r"peft_type 'IA3' \(served: 'LORA'\): train it without"),
        ({"bias": "all"}, "bias 'all'"),
        ({"use_dora": True}, "use_dora True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": []}, "target_modules is missing"),
        ({"target_modules": ".*_proj"}, "a list of names is needed"),
        ({"target_modules": ["wqkv"]}, "names 'wqkv', the base has down_proj"),
        ({"target_modules": ["q_proj"]}, "also holds layer 0 mlp.down_proj"),
        ({"rank_pattern": {"q_proj": 64}}, "rank_pattern is 64"),
        ({"rank_pattern": {"^q": 4}}, "expression"),
        ({"rank_pattern": [1]}, "an object is needed"),
        ({"alpha_pattern": {"q_proj": None}}, "lora_alpha is None"),
        ({"layers_to_transform": "0"}, "numbers of layers"),
        ({"layers_to_transform": [0]}, "also holds layer 1"),
        ({"exclude_modules": 5}, "exclude_modules is 5"),
    ],
)
def test_configs(adapter_dir, base_config, sources, changes, text) -> None:
    edit_config(adapter_dir, **changes)
    reasons = check_adapter(sources(adapter_dir), base_config, LIMITS)
    assert len(reasons) == 1, reasons
    assert re.search(text, reasons[0]), reasons
    assert reasons[0].startswith("adapter_"), reasons


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({Q0 + "A.weight": None}, "has no lora_A of layer 0 self_attn.q_proj"),
        ({Q0 + "A.weight": None, Q0 + "B.weight": None}, "lacks layer 0 self_attn.q_proj"),
        (
            {Q0 + "A.weight": np.zeros((3, 64), np.float32)},
            "is [3, 64], this base and rank need [4, 64]",
        ),
        ({Q0 + "A.weight": np.zeros((4, 64), np.float64)}, "is F64: save it as F16, BF16, F32"),
        ({"lm_head.weight": np.zeros(1, np.float32)}, "no engine serves lm_head.weight"),
        (
            {Q0.replace("layers.0", "layers.00") + "A.weight": np.zeros((4, 64), np.float32)},
            "twice",
        ),
        (
            {Q0.replace("layers.0", "layers.7") + "A.weight": np.zeros(1, np.float32)},
            "also holds layer 7",
        ),
    ],
)
def test_tensors(adapter_dir, base_config, sources, changes, text) -> None:
    edit_tensors(adapter_dir, changes)
    reasons = check_adapter(sources(adapter_dir), base_config, LIMITS)
    assert len(reasons) == 1, reasons
    assert text in reasons[0]


def test_all_reasons_are_told(adapter_dir, base_config, sources) -> None:
    (adapter_dir / "adapter_model.bin").write_bytes(b"\x80\x04")
    (adapter_dir / "modeling.py").write_text("import os")
    (adapter_dir / "deep").mkdir()
    (adapter_dir / "deep" / "README.md").write_text("")
    (adapter_dir / "adapter_config.json").write_text("{")
    (adapter_dir / "adapter_model.safetensors").write_bytes(b"short")
    reasons = check_adapter(sources(adapter_dir), base_config, LIMITS)
    assert [reason.split()[0].rstrip(":") for reason in reasons] == [
        *("adapter_model.bin", "deep/README.md", "modeling.py"),
        *("adapter_config.json", "adapter_model.safetensors"),
    ]
    assert "pickled objects" in reasons[0]


def test_missing_files_and_bounds(adapter_dir, base_config, sources) -> None:
    assert len(check_adapter({}, base_config, LIMITS)) == 2
    small = AdapterLimits(size_bytes_max=1000)
    assert "1000 are allowed" in check_adapter(sources(adapter_dir), base_config, small)[0]
    assert "takes no adapters" in check_adapter(sources(adapter_dir), {}, LIMITS)[0]
    impossible = base_config | {"num_hidden_layers": 10**9}
    assert "impossible sizes" in check_adapter(sources(adapter_dir), impossible, LIMITS)[0]


def test_many_misfits_are_a_few_sentences(adapter_dir, base_config, sources) -> None:
    reasons = check_adapter(sources(adapter_dir), base_config | {"hidden_size": 128}, LIMITS)
    assert len(reasons) == 9
    assert "this base and rank need" in reasons[0]


VALUES = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        4,
        4.0,
        8,
        17,
        -1,
        1e300,
        "",
        "q_proj",
        "all-linear",
        "none",
        "LORA",
        [],
        {},
        ["q_proj"],
        ["self_attn.q_proj", "v_proj"],
        [0],
        [0, 1],
        {"q_proj": 4},
        {"q_proj": 2},
        {"layers.1.mlp.up_proj": 4.5},
        ["layers.0.self_attn.q_proj"],
    ]
)
FIELDS = st.sampled_from(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "init_lora_weights",
        "lora_dropout",
        "use_dora",
        "modules_to_save",
        "megatron_config",
        "layers_pattern",
        "fan_in_fan_out",
    ]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(FIELDS, VALUES, max_size=3),
    targets=st.sets(st.sampled_from(PROJECTIONS), min_size=1),
)
def test_the_engine_takes_every_accepted_adapter(
    tmp_path, shared_base, base_config, sources, changes, targets
) -> None:
    write_random_adapter(
        tmp_path / "a", shared_base, rank=4, targets=sorted(targets), changes=changes
    )
    reasons = check_adapter(sources(tmp_path / "a"), base_config, LIMITS)
    try:
        read_adapter("d" * 64, tmp_path / "a", ModelConfig.of(base_config), 16)
    except RefusedError as error:
        assert reasons, error.message
    else:
        assert reasons == []
