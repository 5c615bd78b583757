"""Writes and checks INT8 checkpoints with one scale per matrix row, as in compressed-tensors.

`<name>.weight` is I8 [outputs, inputs]. `<name>.weight_scale` is F32, F16 or BF16 [outputs] or
[outputs, 1]. Each row is multiplied by its scale (format `int-quantized`, symmetric, strategy
`channel`). Activations have the engine's precision. The command `python -m replica.engine.quantized
SOURCE TARGET` quantises a base.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from replica.engine.artifact import read_json
from replica.engine.checkpoint import SINGLE_FILE, is_weight_file, read_checkpoint
from replica.engine.safetensors import Array, widened, write_safetensors

_WEIGHT_SCHEME: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
}
_QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": _WEIGHT_SCHEME,
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
    "kv_cache_scheme": None,
}
_SUPPORTED = "supported is compressed-tensors, int-quantized, 8 bits, symmetric, per channel"


def quantization_problem(config: Any) -> str:
    """Return why a `quantization_config` is not supported, or empty if it is.

    A checkpoint for 8-bit activations is accepted. The engine does not round its activations, so
    its results are more exact.
    """
    if not isinstance(config, dict):
        return f"{config!r}"
    given = cast("dict[str, Any]", config)
    wanted = {name: _QUANTIZATION[name] for name in ("quant_method", "format")}
    wrong = {name: given.get(name) for name, value in wanted.items() if given.get(name) != value}
    if given.get("kv_cache_scheme") is not None:
        wrong["kv_cache_scheme"] = given["kv_cache_scheme"]
    groups: dict[str, Any] = given.get("config_groups") or {}
    for group in groups.values():
        scheme: dict[str, Any] = group.get("weights") or {}
        for name, value in _WEIGHT_SCHEME.items():
            if scheme.get(name) != value:
                wrong[f"weights.{name}"] = scheme.get(name)
    if not groups:
        wrong["config_groups"] = groups
    return f"{wrong!r} ({_SUPPORTED})" if wrong else ""


def quantize_rows(matrix: Array) -> tuple[Array, Array]:
    """Return the int8 values of a float matrix, and the float32 scale of each row [rows]."""
    values = widened(matrix)
    scale = np.abs(values).max(axis=1) / np.float32(127)
    scale[scale == 0] = 1.0
    return np.round(values / scale[:, None]).astype(np.int8), scale.astype(np.float32)


def quantize_base(source: Path, target: Path) -> None:
    """Write the base in `source` with INT8 matrices into the directory `target`.

    The directory is created if it is missing. Vectors (norms, biases) retain their type, and every
    file without weights is copied.

    Raises:
        ArtifactError: `source` is not a valid checkpoint.
    """
    config = read_json(source / "config.json")
    tensors: dict[str, Array] = {}
    for name, array in read_checkpoint(source).items():
        if array.ndim == 2 and array.dtype != np.int8:
            tensors[name], tensors[f"{name}_scale"] = quantize_rows(array)
        else:
            tensors[name] = array
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not is_weight_file(path.name):
            shutil.copy(path, target)
    config["quantization_config"] = _QUANTIZATION
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_safetensors(target / SINGLE_FILE, tensors)


def main() -> None:
    """Quantise a base by the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Write an INT8 copy of a base.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    quantize_base(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
