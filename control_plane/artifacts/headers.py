"""Reads the headers of safetensors files, and JSON files, from untrusted artifacts. Pure.

A claimed size alone causes neither a read nor an allocation, because lengths are first checked
against the file and a bound. An accepted header describes every byte of its file exactly once.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

ADAPTER_HEADER_BYTES_MAX = 4 << 20
BASE_HEADER_BYTES_MAX = 16 << 20
_LENGTH_BYTES = 8
_AXES_MAX = 8
_NAME_CHARACTERS_MAX = 512
_ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
_METADATA = "__metadata__"


class CheckError(ValueError):
    """A file cannot be accepted. The message names the file, the mistake and the fix."""


class ArtifactFile(Protocol):
    """A file of an artifact, of which parts can be read."""

    @property
    def name(self) -> str:
        """The name of the file, relative to the artifact."""
        ...

    @property
    def size_bytes(self) -> int:
        """The size of the whole file in bytes."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. The range must be within `size_bytes`."""
        ...


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's entry in a header. The bytes of the tensor are verified to be within the file."""

    dtype: str
    shape: tuple[int, ...]


def read_tensors(file: ArtifactFile, header_bytes_max: int) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, after checks of the header.

    Raises:
        CheckError: The header is not valid, or does not match the file.
    """
    if file.size_bytes < _LENGTH_BYTES:
        raise _broken(file, f"has only {file.size_bytes} bytes")
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    held = file.size_bytes - _LENGTH_BYTES
    if length > min(held, header_bytes_max):
        limit = f"{held} follow, and {header_bytes_max} are read"
        raise _broken(file, f"claims a header of {length} bytes, but {limit}")
    header = _parsed(file, file.read(_LENGTH_BYTES, length))
    header.pop(_METADATA, None)
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        tensors[name], begin, end = _tensor(file, name, entry)
        spans.append((begin, end, name))
    _check_spans(file, spans, held - length)
    return tensors


def read_json(file: ArtifactFile, bytes_max: int) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckError if it is not valid or too large."""
    return _parsed(file, _bounded(file, bytes_max))


def read_text(file: ArtifactFile, bytes_max: int) -> str:
    """Return a file's text. Raises CheckError if the file is not UTF-8 or is too large."""
    try:
        return _bounded(file, bytes_max).decode()
    except UnicodeDecodeError as error:
        message = f"{file.name} is not UTF-8 (byte {error.start}): save it as UTF-8"
        raise CheckError(message) from None


def _bounded(file: ArtifactFile, bytes_max: int) -> bytes:
    if file.size_bytes > bytes_max:
        raise CheckError(
            f"{file.name} has {file.size_bytes} bytes and at most {bytes_max} are read:"
            " is it the right file?"
        )
    return file.read(0, file.size_bytes)


def _parsed(file: ArtifactFile, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice in an object")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        document = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"is not JSON where it must be ({error!s:.100})") from None
    if not isinstance(document, dict):
        raise _broken(file, "does not hold a JSON object")
    return cast("dict[str, Any]", document)


def _tensor(file: ArtifactFile, name: str, entry: object) -> tuple[Tensor, int, int]:
    """Return a tensor, with the start and the end of its bytes."""
    where = f"tensor {name:.100}"
    if len(name) > _NAME_CHARACTERS_MAX:
        raise _broken(file, f"has a name of {len(name)} characters, {where}")
    if not isinstance(entry, dict):
        raise _broken(file, f"describes {where} by no object")
    fields = cast("dict[str, Any]", entry)
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(file, f"has unknown or missing fields in {where}")
    dtype, shape = fields["dtype"], _counts(fields["shape"])
    offsets = _counts(fields["data_offsets"])
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise CheckError(
            f"{file.name}: {where} has dtype {dtype!r:.40}, which is not taken: save it as F16,"
            " BF16 or F32"
        )
    if shape is None or len(shape) > _AXES_MAX:
        raise _broken(file, f"has no shape of at most {_AXES_MAX} axes in {where}")
    if offsets is None or len(offsets) != 2:
        raise _broken(file, f"has no pair of offsets in {where}")
    begin, end = offsets
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise _broken(file, f"gives {end - begin} bytes to {where}, {dtype} {list(shape)}")
    return Tensor(dtype, shape), begin, end


def _counts(value: object) -> tuple[int, ...] | None:
    """Return a list of sizes, or None if the value is not a list of sizes."""
    if not isinstance(value, list):
        return None
    numbers = cast("list[Any]", value)
    # No file can have larger sizes, and larger numbers would only slow the arithmetic down.
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        return None
    return tuple(numbers)


def _check_spans(file: ArtifactFile, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Refuse tensors that overlap, leave gaps, or lie outside the file."""
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            problem = "overlaps the one before it" if begin < at else "leaves a gap before it"
            raise _broken(file, f"has its tensors not one after the other: {name:.100} {problem}")
        at = end
    if at != data_bytes:
        raise _broken(file, f"has {data_bytes} bytes of data, but its tensors take {at}")


def _broken(file: ArtifactFile, problem: str) -> CheckError:
    return CheckError(f"{file.name} {problem}: save it anew, it may be cut off or no such file")
