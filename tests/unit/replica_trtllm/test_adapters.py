import json
from pathlib import Path

import pytest

from replica.drivers.trtllm_adapters import adapter_number, read_directory_adapter
from replica.engine.types import RefusedError
from sluice.errors import ErrorCode


def write(directory: Path, weights: str = "adapter_model.safetensors", **config) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8, **config}))
    if weights:
        (directory / weights).write_bytes(bytes(100))
    return directory


def test_an_adapter_is_its_directory(tmp_path: Path) -> None:
    adapter = read_directory_adapter("d", write(tmp_path / "a", peft_type="LORA"), 8)
    assert (adapter.directory, adapter.rank, adapter.memory_bytes) == (tmp_path / "a", 8, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 16}, "r is 16; 1 to 8 are served"),
        ({"r": True}, "r is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"weights": ""}, "holds none of adapter_model.safetensors"),
    ],
)
def test_others_are_refused(tmp_path: Path, changes, message) -> None:
    with pytest.raises(RefusedError, match=message) as refused:
        read_directory_adapter("digest", write(tmp_path / "a", **changes), 8)
    assert refused.value.code is ErrorCode.ADAPTER_INVALID


def test_numbers_are_of_the_content_and_fit() -> None:
    numbers = [adapter_number(f"digest-{index}") for index in range(1000)]
    assert len(set(numbers)) == 1000
    assert numbers[5] == adapter_number("digest-5")
    assert min(numbers) > 0
    assert max(numbers) < 1 << 63
