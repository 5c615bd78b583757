import json
from pathlib import Path

import numpy as np
import pytest

from replica.engine.safetensors import SafetensorsError, read_safetensors, write_safetensors


def test_a_written_file_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1.5, -2.0], np.float16),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 4), np.float32),
    }
    write_safetensors(tmp_path / "x", tensors)
    read = read_safetensors(tmp_path / "x")
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype
        assert read[name].shape == array.shape
        assert (read[name] == array).all()


def test_bf16_is_widened(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 0.15625], np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    write_raw(tmp_path / "x", {"a": entry("BF16", [3], 0, 6)}, raw)
    assert (read_safetensors(tmp_path / "x")["a"] == values).all()


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_raw(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "data", "text"),
    [
        ({"a": entry("F32", [4], 0, 16)}, b"\0" * 8, "not in the file"),
        ({"a": entry("F32", [4], -16, 0)}, b"\0" * 16, "not in the file"),
        ({"a": entry("F32", [4], 8, 0)}, b"\0" * 16, "not in the file"),
        ({"a": entry("F32", [3], 0, 16)}, b"\0" * 16, "do not hold"),
        ({"a": entry("F32", [-2, -2], 0, 16)}, b"\0" * 16, "not in the file"),
        ({"a": entry("F8_E4M3", [16], 0, 16)}, b"\0" * 16, "F8_E4M3 is not supported"),
        ({"a": entry("F32", [2**32, 2**32], 0, 0)}, b"", "do not hold"),
        ({"a": entry("F32", [2**70], 0, 0)}, b"", "do not hold"),
        ({"a": entry("F32", [1] * 40, 0, 4)}, b"\0" * 4, "do not hold"),
        ({"a": entry("F32", [float("inf")], 0, 4)}, b"\0" * 4, "broken header entry"),
        ({"a": {"dtype": "F32"}}, b"", "broken header entry"),
        ({"a": 7}, b"", "broken header entry"),
        ([1], b"", "not a JSON object"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, header: object, data: bytes, text: str) -> None:
    write_raw(tmp_path / "x", header, data)
    with pytest.raises(SafetensorsError, match=text):
        read_safetensors(tmp_path / "x")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0{}"])
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SafetensorsError, match="does not fit"):
        read_safetensors(tmp_path / "x")


def test_a_header_that_is_not_json_is_refused(tmp_path: Path) -> None:
    for header in (b"{!", b"[" * 100_000):
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(SafetensorsError, match="not JSON"):
            read_safetensors(tmp_path / "x")


def test_a_file_may_be_read_without_a_map(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "empty": np.zeros(0, np.int8)}
    write_safetensors(tmp_path / "x", tensors)
    read = read_safetensors(tmp_path / "x", is_mapped=False)
    (tmp_path / "x").write_bytes(b"")  # this would destroy the arrays of a mapped file
    assert read["a"].tolist() == tensors["a"].tolist()
    assert read["empty"].shape == (0,)


def test_a_header_may_be_bounded(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {f"tensor {i}": np.zeros(1, np.int8) for i in range(99)})
    with pytest.raises(SafetensorsError, match="than the 1000 bytes"):
        read_safetensors(tmp_path / "x", header_bytes_max=1000)
    assert len(read_safetensors(tmp_path / "x", header_bytes_max=9999)) == 99
