"""Reads LoRA adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors.

An adapter is foreign data. If only a part of it were applied, answers would be wrong without an
error. So each field of its config and each tensor must be used or have no effect. All others are
refused, and the refusal names them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from replica.engine.architectures import PROJECTIONS, ModelConfig
from replica.engine.artifact import ArtifactError, read_json
from replica.engine.safetensors import (
    BFLOAT16,
    Array,
    SafetensorsError,
    read_safetensors,
    widened,
)
from replica.engine.types import RefusedError
from sluice.errors import ErrorCode

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_USED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
    | {"target_modules", "exclude_modules", "layers_to_transform"}
)
# Fields about training, and fields whose content follows from the names of the tensors.
_HARMLESS = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version"}
    | {"revision", "task_type", "layers_pattern", "runtime_config", "megatron_core", "eva_config"}
    | {"qalora_group_size"}
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # With other initialisations (pissa, olora, loftq, ...), the adapter belongs to a changed base.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
# Largest sizes of JSON in bytes. To read a megabyte blocks all other threads for 10 ms. A header
# has about 200 bytes per tensor.
_CONFIG_BYTES_MAX, _HEADER_BYTES_MAX = 1 << 20, 4 << 20
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.([a-z_.]+)\.lora_([AB])\.weight")
_LITERAL = re.compile(r"[A-Za-z0-9_.]+")
_SHORT = {name.rpartition(".")[2] for name in PROJECTIONS}

Module = tuple[int, str]  # (layer, one of PROJECTIONS)


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """An adapter's change to one projection, y += (x down^T) up.

    Attributes:
        down: Matrix from the inputs to the rank, float32 [rank, inputs].
        up: Matrix from the rank to the outputs, float32 [rank, outputs]. It includes the scaling.
    """

    down: Array
    up: Array


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A checked adapter in host memory. Its arrays are copies, not views of the file."""

    rank: int
    deltas: Mapping[Module, LoraDelta]

    @property
    def memory_bytes(self) -> int:
        """Number of bytes of all matrices."""
        return sum(delta.down.nbytes + delta.up.nbytes for delta in self.deltas.values())


def read_adapter(digest: str, directory: Path, base: ModelConfig, rank_max: int) -> LoraAdapter:
    """Return the adapter in `directory`.

    Args:
        digest: Digest of the adapter, which error messages name.
        directory: Directory in PEFT's layout.
        base: Configuration of the base whose projections the adapter changes.
        rank_max: Largest rank of one adapter.

    Raises:
        RefusedError: With ADAPTER_NOT_FOUND if there is no directory, or with ADAPTER_INVALID for
            any defect. The message names the unsupported part, and the limit if there is one.
    """
    if not directory.is_dir():
        raise RefusedError(
            ErrorCode.ADAPTER_NOT_FOUND,
            f"adapter {digest[:12]}: its files are not on this node; import the artifact",
        )
    try:
        config = _read_config(directory)
        scaling = _Scaling.of(config, rank_max)
        deltas = _read_deltas(directory, base, scaling)
        _check_complete(config, base, deltas)
    except (ArtifactError, SafetensorsError) as error:
        raise RefusedError(ErrorCode.ADAPTER_INVALID, f"adapter {digest[:12]}: {error}") from None
    return LoraAdapter(max(len(delta.down) for delta in deltas.values()), deltas)


def _read_config(directory: Path) -> dict[str, Any]:
    _check_size(directory / CONFIG_FILE, _CONFIG_BYTES_MAX)
    config = read_json(directory / CONFIG_FILE)
    problems = [
        f"{name} {config.get(name)!r} (supported: {_texts(values)})"
        for name, values in _ONLY.items()
        if not _is_one_of(config.get(name), values)
    ]
    problems += [
        f"{name} {value!r}"
        for name, value in config.items()
        if name not in _USED | _HARMLESS | _ONLY.keys() and value not in (None, False, {}, [])
    ]
    if problems:
        raise ArtifactError(f"{CONFIG_FILE}: this engine cannot serve {', '.join(problems)}")
    return config


def _check_size(path: Path, bytes_max: int) -> None:
    size = path.stat().st_size if path.exists() else 0
    if size > bytes_max:
        raise ArtifactError(f"{path.name} has {size} bytes; at most {bytes_max} are read")


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    # The types are also compared, because 1 == True, but their meanings differ here.
    return any(value == known and type(value) is type(known) for known in values)


def _texts(values: Iterable[Any]) -> str:
    return ", ".join(repr(value) for value in values)


@dataclass(frozen=True, slots=True)
class _Scaling:
    """The ranks and scaling factors of an adapter's modules."""

    rank: int
    alpha: float
    is_stabilised: bool  # whether rslora's factor alpha / sqrt(rank) replaces alpha / rank
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    rank_max: int

    @classmethod
    def of(cls, config: Mapping[str, Any], rank_max: int) -> "_Scaling":
        patterns = [_pattern(config, name) for name in ("rank_pattern", "alpha_pattern")]
        rank, alpha = config.get("r"), config.get("lora_alpha")
        for name, value in [("r", rank), *[("rank_pattern", v) for v in patterns[0].values()]]:
            if type(value) is not int or not 1 <= value <= rank_max:
                raise ArtifactError(
                    f"{CONFIG_FILE}: {name} is {value!r}; this engine serves ranks 1 to {rank_max}"
                    " (its option adapter_rank)"
                )
        for value in (alpha, *patterns[1].values()):
            if type(value) not in (int, float) or not math.isfinite(cast("float", value)):
                raise ArtifactError(f"{CONFIG_FILE}: lora_alpha is {value!r}; a number is needed")
        return cls(
            rank=cast("int", rank),
            alpha=cast("float", alpha),
            is_stabilised=bool(config.get("use_rslora")),
            rank_pattern=patterns[0],
            alpha_pattern=patterns[1],
            rank_max=rank_max,
        )

    def rank_of(self, module: Module) -> int:
        return _first_match(self.rank_pattern, module, self.rank)

    def factor_of(self, module: Module) -> float:
        rank, alpha = self.rank_of(module), _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_stabilised else alpha / rank


def _pattern(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a rank or alpha pattern, whose keys must be plain names of modules."""
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise ArtifactError(f"{CONFIG_FILE}: {name} is {given!r}; an object is needed")
    pattern = cast("dict[str, Any]", given)
    for key in pattern:
        if not _LITERAL.fullmatch(key):
            raise ArtifactError(
                f"{CONFIG_FILE}: {name} has the expression {key!r}; this engine takes plain names"
            )
    return pattern


def _first_match(pattern: Mapping[str, Any], module: Module, default: Any) -> Any:
    return next((value for key, value in pattern.items() if _names(key, module)), default)


def _names(target: str, module: Module) -> bool:
    """Whether a name in a config equals the module's whole path, or the end of its path."""
    path = f"model.layers.{module[0]}.{module[1]}"
    return path == target or path.endswith(f".{target}")


def _read_deltas(directory: Path, base: ModelConfig, scaling: _Scaling) -> dict[Module, LoraDelta]:
    path = directory / TENSOR_FILE
    if not path.exists():
        raise ArtifactError(
            f"{TENSOR_FILE} is missing; save the adapter as safetensors (pickled weights,"
            " adapter_model.bin, are never read)"
        )
    shapes = base.projection_shapes()
    sizes = sum(outputs + inputs for outputs, inputs in shapes.values())
    # The largest possible adapter has the largest rank in all projections, in float32.
    _check_size(path, _HEADER_BYTES_MAX + 4 * base.layers * sizes * scaling.rank_max)
    read = read_safetensors(
        path, keeps_bf16=True, is_mapped=False, header_bytes_max=_HEADER_BYTES_MAX
    )
    halves: dict[str, dict[Module, Array]] = {"A": {}, "B": {}}
    for name, array in read.items():
        module, half = _place(name, base)
        halves[half][module] = _checked(name, array)
    unpaired = halves["A"].keys() ^ halves["B"].keys()
    if unpaired:
        layer, name = min(unpaired)
        raise ArtifactError(
            f"{TENSOR_FILE}: layer {layer} {name} has only one of lora_A and lora_B"
        )
    if not halves["A"]:
        raise ArtifactError(f"{TENSOR_FILE} holds no tensors")
    deltas: dict[Module, LoraDelta] = {}
    for module, down in halves["A"].items():
        up = halves["B"][module]
        rank = scaling.rank_of(module)
        outputs, inputs = shapes[module[1]]
        for letter, array, shape in (("A", down, (rank, inputs)), ("B", up, (outputs, rank))):
            if array.shape != shape:
                raise ArtifactError(
                    f"{TENSOR_FILE}: lora_{letter} of layer {module[0]} {module[1]} is"
                    f" {list(array.shape)}; this base and rank need {list(shape)}"
                )
        with np.errstate(over="ignore"):
            scaled = np.ascontiguousarray(up.T) * np.float32(scaling.factor_of(module))
        if not np.isfinite(scaled).all():
            raise ArtifactError(f"{TENSOR_FILE}: layer {module[0]} {module[1]} overflows, scaled")
        deltas[module] = LoraDelta(down, scaled)
    return deltas


def _place(name: str, base: ModelConfig) -> tuple[Module, str]:
    """Return the layer, the projection and the matrix (A or B) that a tensor's name denotes."""
    match = _TENSOR.fullmatch(name)
    if match is None or match[2] not in PROJECTIONS:
        raise ArtifactError(
            f"{TENSOR_FILE}: this engine cannot serve {name}; it takes lora_A and lora_B of"
            f" {', '.join(PROJECTIONS)}"
        )
    layer = int(match[1])
    if layer >= base.layers:
        raise ArtifactError(f"{TENSOR_FILE}: {name}, but the base has {base.layers} layers")
    return (layer, match[2]), match[3]


def _checked(name: str, array: Array) -> Array:
    """Return a float32 copy. Raises ArtifactError for other types and non-finite numbers."""
    if array.dtype not in _FLOATS:
        raise ArtifactError(f"{TENSOR_FILE}: {name} is {array.dtype}; F32, F16 or BF16 is needed")
    values = np.array(widened(array))
    if not np.isfinite(values).all():
        raise ArtifactError(f"{TENSOR_FILE}: {name} holds numbers that are not finite")
    return values


def _check_complete(
    config: Mapping[str, Any], base: ModelConfig, deltas: Mapping[Module, LoraDelta]
) -> None:
    """Raise ArtifactError unless the tensors are exactly those that the config announces."""
    every = [(layer, name) for layer in range(base.layers) for name in PROJECTIONS]
    targets = _targets(config, "target_modules")
    if not targets:
        raise ArtifactError(f"{CONFIG_FILE}: target_modules is missing or empty")
    for target in targets:
        if not any(_names(target, module) for module in every):
            raise ArtifactError(
                f"{CONFIG_FILE}: target_modules names {target!r}; this base has"
                f" {', '.join(sorted(_SHORT))} in {base.layers} layers"
            )
    excluded = _targets(config, "exclude_modules")
    layers = _layers(config)
    wanted = {
        module
        for module in every
        if any(_names(target, module) for target in targets)
        and not any(_names(target, module) for target in excluded)
        and (layers is None or module[0] in layers)
    }
    lacking, extra = wanted - deltas.keys(), deltas.keys() - wanted
    for problem, modules in (("lacks", lacking), ("also holds", extra)):
        if modules:
            layer, name = min(modules)
            raise ArtifactError(
                f"{TENSOR_FILE} {problem} layer {layer} {name} ({len(modules)} in all): it does not"
                f" fit to {CONFIG_FILE}"
            )


def _layers(config: Mapping[str, Any]) -> list[int] | None:
    """Return the layers that the adapter changes, or None if it changes all layers."""
    given = config.get("layers_to_transform")
    if given is None:
        return None
    layers = cast("list[Any]", given if isinstance(given, list) else [given])
    if not all(isinstance(layer, int) for layer in layers):
        raise ArtifactError(
            f"{CONFIG_FILE}: layers_to_transform is {given!r:.80}; numbers of layers are needed"
        )
    return layers


def _targets(config: Mapping[str, Any], field: str) -> list[str]:
    given = config.get(field)
    if given == "all-linear":
        return sorted(_SHORT)
    names = cast("list[Any]", given or [])
    if not isinstance(given or [], list) or not all(isinstance(name, str) for name in names):
        raise ArtifactError(
            f"{CONFIG_FILE}: {field} is {given!r}; a list of names is needed, not an expression"
        )
    return names
