"""Reads the weights of a base from one safetensors file, or from several files with an index."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replica.engine.artifact import ArtifactError, read_json
from replica.engine.safetensors import (
    BFLOAT16,
    Array,
    SafetensorsError,
    read_safetensors,
    widened,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
# End of the names of tensors that older checkpoints contain. config.json also determines their
# values, so they are ignored.
_DERIVED = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a checkpoint.

    Attributes:
        values: Values as float32, float16, `BFLOAT16`, or int8 with a scale.
        scale: Scale of int8 values, one per row, as float32 [rows].
    """

    values: Array
    scale: Array | None = None

    def as_float32(self) -> Array:
        """Return the numbers that the values and the scale represent."""
        if self.scale is None:
            return widened(self.values)
        return self.values.astype(np.float32) * self.scale[:, None]


def is_weight_file(name: str) -> bool:
    """Whether a file of a base contains weights or the index of weight files."""
    return name == INDEX_FILE or name.endswith(".safetensors")


def read_checkpoint(directory: Path) -> dict[str, Array]:
    """Return all tensors of a base, as views of its memory-mapped files.

    Raises:
        ArtifactError: No weight file exists, a file is broken, or the index does not match the
            files.
    """
    if (directory / SINGLE_FILE).exists():
        files = [SINGLE_FILE]
    elif (directory / INDEX_FILE).exists():
        files = _shards(directory)
    else:
        raise ArtifactError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; import the whole base, with"
            " its weights as safetensors"
        )
    tensors: dict[str, Array] = {}
    for name in files:
        try:
            read = read_safetensors(directory / name, keeps_bf16=True)
        except FileNotFoundError:
            raise ArtifactError(
                f"{directory / name} is missing, {INDEX_FILE} names it; import the whole base"
            ) from None
        except SafetensorsError as error:
            raise ArtifactError(f"{error}; import the base anew") from None
        if twice := tensors.keys() & read.keys():
            raise ArtifactError(f"{directory / name} holds {min(twice)} again; import it anew")
        tensors.update(read)
    return {name: array for name, array in tensors.items() if not name.endswith(_DERIVED)}


def _shards(directory: Path) -> list[str]:
    path = directory / INDEX_FILE
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ArtifactError(f"{path} has no weight_map; import the base anew")
    names: list[Any] = sorted({str(name) for name in listed.values()})
    for name in names:
        if Path(name).name != name or not is_weight_file(name):
            raise ArtifactError(f"{path} names {name!r}, which is no safetensors file beside it")
    return names


def join_scales(tensors: Mapping[str, Array]) -> dict[str, Weight]:
    """Return the weights by name. An INT8 matrix and its scale become one weight.

    Raises:
        ArtifactError: A type is not supported, or an INT8 matrix has no scale per row.
    """
    weights: dict[str, Weight] = {}
    scales = {name for name, array in tensors.items() if array.dtype == np.int8}
    scales = {f"{name}_scale" for name in scales}
    for name, values in tensors.items():
        if name in scales:
            continue
        if values.dtype in _FLOATS:
            weights[name] = Weight(values)
            continue
        if values.dtype != np.int8:
            raise ArtifactError(
                f"{name} is {values.dtype}; supported are F32, F16, BF16, and I8 with a scale"
            )
        scale = tensors.get(f"{name}_scale")
        rows = values.shape[0] if values.ndim == 2 else -1
        if scale is None or scale.dtype not in _FLOATS or scale.shape not in ((rows,), (rows, 1)):
            raise ArtifactError(
                f"{name} is I8 {list(values.shape)} without a float {name}_scale for each of its"
                " rows; quantise the base again (python -m replica.engine.quantized)"
            )
        weights[name] = Weight(values, widened(scale).reshape(-1))
    return weights


def check_shapes(
    weights: Mapping[str, Weight], wanted: Mapping[str, tuple[int, ...]], optional: frozenset[str]
) -> None:
    """Raise ArtifactError unless the weights are exactly those that config.json describes.

    Args:
        weights: Weights of the checkpoint.
        wanted: Name of each required tensor -> its shape.
        optional: Names of further tensors that may exist but are not used.
    """
    lacking = sorted(wanted.keys() - weights.keys())
    extra = sorted(weights.keys() - wanted.keys() - optional)
    wrong = sorted(
        f"{name} {tuple(weights[name].values.shape)} instead of {shape}"
        for name, shape in wanted.items()
        if name in weights and tuple(weights[name].values.shape) != shape
    )
    for problem, names in (("lacks", lacking), ("also holds", extra), ("has", wrong)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ArtifactError(
                f"the checkpoint {problem} {', '.join(names[:3])}{more}: it does not fit to"
                " config.json; import the base anew"
            )
