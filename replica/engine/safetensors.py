"""Reader and writer of safetensors files, by numpy alone.

The file is data from outside: every length and offset is checked before it is used.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_DTYPES: dict[str, type[np.generic]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_HEADER_BYTES_MAX = 100_000_000  # the limit of the reference implementation


class SafetensorsError(ValueError):
    """The file is not a safetensors file that we can read; the message says where."""


def read_safetensors(path: Path) -> dict[str, Array]:
    """Return all tensors of a file by name.

    The arrays are views of the memory-mapped file, except BF16, which is widened to float32.

    Raises:
        SafetensorsError: Broken header, unknown type, or a tensor outside the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _HEADER_BYTES_MAX):
            raise SafetensorsError(
                f"{path}: the header of {header_bytes} bytes does not fit into the file"
            )
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise SafetensorsError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise SafetensorsError(f"{path}: the header is not a JSON object")
    begin = 8 + header_bytes
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=begin) if size > begin else None
    entries = cast("dict[str, Any]", header)
    return {
        name: _tensor(f"{path}: tensor {name}", info, data)
        for name, info in entries.items()
        if name != "__metadata__"
    }


def _tensor(where: str, info: Any, data: Array | None) -> Array:
    try:
        dtype = str(info["dtype"])
        shape = [int(n) for n in info["shape"]]
        begin, end = (int(offset) for offset in info["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise SafetensorsError(f"{where}: broken header entry ({error!r})") from None
    held = 0 if data is None else data.shape[0]
    if not 0 <= begin <= end <= held or any(n < 0 for n in shape):
        raise SafetensorsError(f"{where}: bytes {begin}..{end} are not in the file ({held} bytes)")
    if dtype != "BF16" and dtype not in _DTYPES:
        raise SafetensorsError(f"{where}: type {dtype} is not supported")
    item = np.dtype(np.uint16 if dtype == "BF16" else _DTYPES[dtype])
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    if count * item.itemsize != end - begin:
        raise SafetensorsError(f"{where}: {end - begin} bytes do not hold {shape} of {dtype}")
    # A view of a memory map may be unaligned; frombuffer accepts that, ndarray.view does not.
    raw = b"" if data is None else data[begin:end].data
    array = np.frombuffer(raw, item)
    if dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.reshape(shape)


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write arrays as a safetensors file; equal tensors give equal bytes."""
    header: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
