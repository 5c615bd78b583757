"""Headers of safetensors files: what is refused, and that nothing else ever happens."""

import json
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.artifacts.headers import CheckError, Tensor, read_json, read_tensors, read_text

LIMIT = 1 << 16


@dataclass
class Blob:
    content: bytes
    name: str = "weights.safetensors"

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def read(self, offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(self.content)
        return self.content[offset : offset + length]


def packed(header: Any, data: int = 0, *, text: bytes | None = None, length: int | None = None):
    text = json.dumps(header).encode() if text is None else text
    claimed = len(text) if length is None else length
    return Blob(claimed.to_bytes(8, "little") + text + bytes(data))


def entry(begin: int, end: int, dtype: str = "F16", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 2] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def test_a_good_header_is_read_in_two_reads() -> None:
    file = packed(
        {
            "__metadata__": {"format": "pt"},
            "b": entry(4, 8, "F32", [1]),
            "a": entry(0, 4),
            "n": entry(4, 4),
        },
        8,
    )
    assert read_tensors(file, LIMIT) == {
        "a": Tensor("F16", (2,)),
        "b": Tensor("F32", (1,)),
        "n": Tensor("F16", (0,)),
    }


WRONG = [
    (Blob(b""), "only 0 bytes"),
    (Blob(b"\1\0\0"), "only 3 bytes"),
    (packed({}, length=1 << 63), "claims a header of 9223372036854775808"),
    (packed({}, length=3), "claims a header of 3 bytes, but 2 follow"),
    (packed({}, 2 * LIMIT, length=LIMIT + 1), "65536 are read"),
    (packed({}, text=b"\xff{}"), "not JSON"),
    (packed({}, text=b"[]"), "JSON object"),
    (packed({}, text=b"[" * 60_000), "not JSON"),
    (packed({}, text=b'{"a":' + b"9" * 5000 + b"}"), "not JSON"),
    (packed({}, text=b'{"a":1,"a":2}'), "twice"),
    (packed({}, text=b'{"a":NaN}'), "NaN is not JSON"),
    (packed({"a": 1}), "by no object"),
    (packed({"a" * 600: entry(0, 0)}), "600 characters"),
    (packed({"a": entry(0, 4) | {"more": 1}}, 4), "unknown or missing"),
    (packed({"a": entry(0, 4, "F4")}, 4), "dtype 'F4'.*save it as F16"),
    (packed({"a": entry(0, 4, shape=[2.0])}, 4), "no shape"),
    (packed({"a": entry(0, 4, shape=[True, 2])}, 4), "no shape"),
    (packed({"a": entry(0, 4, shape=[-1, -2])}, 4), "no shape"),
    (packed({"a": entry(0, 4, shape=[1] * 9)}, 4), "no shape"),
    (packed({"a": entry(0, 4, shape=[2**62, 2**62])}, 4), "gives 4 bytes"),
    (packed({"a": entry(0, 4, shape=[3])}, 4), "gives 4 bytes to tensor a, F16"),
    (packed({"a": entry(0, 4) | {"data_offsets": [4]}}, 4), "pair of offsets"),
    (packed({"a": entry(4, 0, shape=[0])}, 4), "gives -4 bytes"),
    (packed({"a": entry(0, 4), "b": entry(2, 6)}, 6), "b overlaps"),
    (packed({"a": entry(0, 4), "b": entry(6, 8)}, 8), "b leaves a gap"),
    (packed({"a": entry(2, 4)}, 4), "a leaves a gap"),
    (packed({"a": entry(0, 4)}, 3), "3 bytes of data, but its tensors take 4"),
    (packed({"a": entry(0, 4)}, 5), "5 bytes of data"),
    (packed({}, 1), "1 bytes of data"),
]


@pytest.mark.parametrize(("file", "text"), WRONG)
def test_malformed_headers_are_refused(file: Blob, text: str) -> None:
    with pytest.raises(CheckError, match=text) as caught:
        read_tensors(file, LIMIT)
    assert str(caught.value).startswith("weights.safetensors")
    assert len(str(caught.value)) < 500


def test_a_claim_allocates_nothing() -> None:
    file = packed({}, length=(1 << 40))
    tracemalloc.start()
    with pytest.raises(CheckError):
        read_tensors(file, 1 << 62)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 16


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F16", "F32", "I8"]) | JSON,
        "shape": st.lists(st.integers(0, 4) | st.integers(), max_size=10) | JSON,
        "data_offsets": st.lists(st.integers(0, 64) | st.integers(), min_size=1, max_size=3) | JSON,
    }
)


@settings(max_examples=300)
@given(
    header=st.dictionaries(st.text(max_size=8), ENTRIES | JSON, max_size=4) | JSON,
    data=st.integers(0, 80),
    length=st.none() | st.integers(0, 2**64 - 1),
)
def test_any_header_is_read_or_refused(header: Any, data: int, length: int | None) -> None:
    file = packed(header, data, length=length)
    try:
        tensors = read_tensors(file, LIMIT)
    except CheckError as error:
        assert len(str(error)) < 1000
    else:
        sizes = {"F16": 2, "F32": 4, "I8": 1}
        total = 0
        for tensor in tensors.values():
            count = sizes.get(tensor.dtype, 8)
            for axis in tensor.shape:
                count *= axis
            total += count
        assert total <= data


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    for read in (
        lambda: read_tensors(Blob(content), LIMIT),
        lambda: read_json(Blob(content), LIMIT),
        lambda: read_text(Blob(content), LIMIT),
    ):
        try:
            read()
        except CheckError as error:
            assert len(str(error)) < 1000


def test_files_that_are_too_large_are_not_read() -> None:
    for read in (read_json, read_text):
        with pytest.raises(CheckError, match="has 5 bytes and at most 4"):
            read(Blob(b"{   }"), 4)
    with pytest.raises(CheckError, match=r"not UTF-8 \(byte 1\)"):
        read_text(Blob(b"a\xff"), 4)
