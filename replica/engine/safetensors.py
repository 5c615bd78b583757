"""Reads and writes safetensors files with numpy only.

A file is foreign data, so every length and offset is checked before it is used.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# bfloat16 for numpy, which lacks it. A separate type prevents that its bits are used as numbers.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
HEADER_BYTES_MAX = 100_000_000  # the limit of the reference implementation
_AXES_MAX = 8  # largest number of axes, more than models use and fewer than numpy permits


class SafetensorsError(ValueError):
    """A file is not a valid safetensors file. The message has the place of the defect."""


def widened(array: Array) -> Array:
    """Return a float array as float32, without a copy where possible."""
    if array.dtype == BFLOAT16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def read_safetensors(
    path: Path,
    *,
    keeps_bf16: bool = False,
    is_mapped: bool = True,
    header_bytes_max: int = HEADER_BYTES_MAX,
) -> dict[str, Array]:
    """Return all tensors of a file by name. If the file is mapped, they are views of the mapping.

    Args:
        path: Path of the file.
        keeps_bf16: Whether BF16 tensors have the type `BFLOAT16`. Otherwise they are copied and
            widened to float32.
        is_mapped: Whether the file is mapped into memory. A failing disk then crashes the process,
            while a file that is read raises OSError.
        header_bytes_max: Largest header in bytes. To parse a megabyte of JSON takes about ten
            milliseconds, during which no other thread runs.

    Raises:
        SafetensorsError: The header is broken, a type is unknown, or a tensor is outside the file.
        OSError: The file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, header_bytes_max):
            raise SafetensorsError(
                f"{path}: the header of {header_bytes} bytes does not fit into the file, or is more"
                f" than the {header_bytes_max} bytes that are read"
            )
        try:
            header = json.loads(file.read(header_bytes))
        except (ValueError, RecursionError) as error:
            raise SafetensorsError(f"{path}: the header is not JSON ({error})") from None
        if not isinstance(header, dict):
            raise SafetensorsError(f"{path}: the header is not a JSON object")
        begin = 8 + header_bytes
        data: Array | None = None
        if not is_mapped:
            data = np.frombuffer(file.read(), np.uint8)
        elif size > begin:
            # The mapping is copy-on-write, because openvino copies constants that are not writable.
            data = np.memmap(path, dtype=np.uint8, mode="c", offset=begin)
    entries = cast("dict[str, Any]", header)
    tensors = {
        name: _tensor(f"{path}: tensor {name}", info, data)
        for name, info in entries.items()
        if name != "__metadata__"
    }
    if not keeps_bf16:
        tensors = {n: widened(a) if a.dtype == BFLOAT16 else a for n, a in tensors.items()}
    return tensors


def _tensor(where: str, info: Any, data: Array | None) -> Array:
    try:
        dtype = str(info["dtype"])
        shape = [int(n) for n in info["shape"]]
        begin, end = (int(offset) for offset in info["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SafetensorsError(f"{where}: broken header entry ({error!r})") from None
    held = 0 if data is None else data.shape[0]
    if not 0 <= begin <= end <= held or any(n < 0 for n in shape):
        raise SafetensorsError(f"{where}: bytes {begin}..{end} are not in the file ({held} bytes)")
    if dtype not in _DTYPES:
        raise SafetensorsError(f"{where}: type {dtype} is not supported")
    item = _DTYPES[dtype]
    if math.prod(shape) * item.itemsize != end - begin or len(shape) > _AXES_MAX:
        raise SafetensorsError(f"{where}: {end - begin} bytes do not hold {shape} of {dtype}")
    # frombuffer accepts an unaligned view of a memory map, and ndarray.view does not.
    raw = b"" if data is None else data[begin:end].data
    return np.frombuffer(raw, item).reshape(shape)


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write arrays as a safetensors file. Equal tensors result in equal bytes."""
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
    text += b" " * (-len(text) % 8)  # padding that aligns the data
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
