"""Tests that the profiles, from which pools start, have valid and possible options."""

import json
from pathlib import Path

import pytest

from replica.drivers.options import parse_options
from replica.drivers.sim_costs import GPUS, MODELS
from replica.drivers.trtllm_options import TrtllmOptions, check_options

FOLDER = Path(__file__).parents[3] / "model_repo" / "profiles" / "trtllm"
PROFILES = sorted(FOLDER.glob("*.json"))


def options_of(path: Path) -> TrtllmOptions:
    options = parse_options(TrtllmOptions, json.loads(path.read_text()))
    check_options(options)
    return options


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_is_valid_and_written_as_pools_write_options(path: Path) -> None:
    document = json.loads(path.read_text())
    assert all(isinstance(value, str) for value in document.values())
    options = options_of(path)
    assert options.step_tokens_max >= options.sequences_max
    readme = (FOLDER / "README.md").read_text()
    assert f"`{path.name}`" in readme


def test_the_usual_bases_have_one() -> None:
    assert {path.stem for path in PROFILES} == {
        "llama-8b-bf16",
        "llama-70b-fp8-tp4",
        "moe-fp8-tp8-ep8",
    }


def test_the_dense_ones_fit_into_their_gpus() -> None:
    for name, shape, weight_bytes in (("llama-8b-bf16", "8b", 2), ("llama-70b-fp8-tp4", "70b", 1)):
        options = options_of(FOLDER / f"{name}.json")
        memory = options.tensor_parallel * GPUS["h100"].memory_bytes * options.kv_memory_share
        left = memory - weight_bytes * MODELS[shape].parameters
        token_bytes = MODELS[shape].kv_token_bytes // (2 if options.kv_dtype == "fp8" else 1)
        # Every sequence of a full batch has room for at least a thousand tokens.
        assert left / token_bytes > 1000 * options.sequences_max
