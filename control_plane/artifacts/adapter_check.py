"""Checks whether an artifact is a LoRA adapter that the engines can serve on a base. Pure.

Only the config and the header of the tensors are read, not the tensor data. All mistakes are
reported, one sentence for each.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from control_plane.artifacts.adapter_config import (
    CONFIG_FILE,
    PROJECTIONS,
    AdapterConfig,
    BaseShape,
    Module,
    base_shape,
    parse_adapter_config,
)
from control_plane.artifacts.headers import (
    ADAPTER_HEADER_BYTES_MAX,
    ArtifactFile,
    CheckError,
    Tensor,
    read_json,
    read_tensors,
)

TENSOR_FILE = "adapter_model.safetensors"
_CONFIG_BYTES_MAX = 1 << 20
_TENSOR_NAME = re.compile(
    r"base_model\.model\.model\.layers\.([0-9]{1,6})\.([a-z_.]+)\.lora_([AB])\.weight"
)
_DTYPES = ("F16", "BF16", "F32")
# Text files that are common beside an adapter and that no program executes.
_OTHER = re.compile(r"[^/]+\.(json|md|txt|jinja)|LICENSE|NOTICE|\.gitattributes")
_PICKLED = re.compile(r".*\.(bin|pt|pth|pkl|pickle|ckpt)")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The limits of rank and size for adapters."""

    rank_max: int = 64
    size_bytes_max: int = 2 << 30


def check_adapter(
    files: Mapping[str, ArtifactFile], base_config: Mapping[str, Any], limits: AdapterLimits
) -> list[str]:
    """Return the reasons why an adapter is refused, one sentence each, or none if it is accepted.

    Args:
        files: Files of the artifact, by name.
        base_config: config.json of the adapter's base.
        limits: Limits of ranks and sizes.
    """
    reasons = check_names(files, lambda name: name in {CONFIG_FILE, TENSOR_FILE})
    size = sum(file.size_bytes for file in files.values())
    if size > limits.size_bytes_max:
        reasons.append(
            f"the adapter has {size} bytes, {limits.size_bytes_max} are allowed: train it with a"
            " lower rank, or save it as F16"
        )
    for name in (CONFIG_FILE, TENSOR_FILE):
        if name not in files:
            reasons.append(f"{name} is missing: save the adapter as PEFT does, as safetensors")
    base = _tried(reasons, lambda: base_shape(base_config))
    config = tensors = None
    if CONFIG_FILE in files:
        config = _tried(reasons, lambda: _config(files[CONFIG_FILE], limits))
    if TENSOR_FILE in files:
        tensors = _tried(reasons, lambda: _tensors(files[TENSOR_FILE]))
    if base is not None and config is not None and tensors is not None:
        reasons += _misfits(config, tensors, base)
    return reasons


def check_names(files: Iterable[str], is_known: Callable[[str], bool]) -> list[str]:
    """Return the mistakes in the names of an artifact's files, one sentence each."""
    reasons: list[str] = []
    for name in files:
        if is_known(name) or _OTHER.fullmatch(name):
            continue
        if _PICKLED.fullmatch(name.lower()):
            reasons.append(
                f"{name} may hold pickled objects, which are never read: save the weights as"
                " safetensors and remove it"
            )
        else:
            reasons.append(f"{name} does not belong into such an artifact: remove it")
    return reasons


def _tried(reasons: list[str], read: Callable[[], Result]) -> Result | None:
    """Return the result of `read`. If `read` raises CheckError, append its text to `reasons`."""
    try:
        return read()
    except CheckError as error:
        reasons.append(str(error))
        return None


def _config(file: ArtifactFile, limits: AdapterLimits) -> AdapterConfig:
    return parse_adapter_config(read_json(file, _CONFIG_BYTES_MAX), limits.rank_max)


def _tensors(file: ArtifactFile) -> dict[tuple[Module, str], Tensor]:
    """Return the tensors by module and by half of the LoRA pair, `A` or `B`."""
    found: dict[tuple[Module, str], Tensor] = {}
    for name, tensor in read_tensors(file, ADAPTER_HEADER_BYTES_MAX).items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or match[2] not in PROJECTIONS:
            raise CheckError(
                f"{TENSOR_FILE}: no engine serves {name:.200}: only lora_A and lora_B of"
                f" {', '.join(PROJECTIONS)} are taken, train without the rest"
            )
        if tensor.dtype not in _DTYPES:
            raise CheckError(
                f"{TENSOR_FILE}: {name} is {tensor.dtype}: save it as {', '.join(_DTYPES)}"
            )
        key = (int(match[1]), match[2]), match[3]
        if key in found:
            raise CheckError(f"{TENSOR_FILE} holds {name} twice: save the adapter anew")
        found[key] = tensor
    if not found:
        raise CheckError(f"{TENSOR_FILE} holds no tensors: save the adapter anew")
    return found


def _misfits(
    config: AdapterConfig, tensors: Mapping[tuple[Module, str], Tensor], base: BaseShape
) -> list[str]:
    """Return the contradictions between config, tensors and base, one sentence each."""
    try:
        wanted = config.modules(base)
    except CheckError as error:
        return [str(error)]
    reasons: list[str] = []
    held = {module for module, _ in tensors}
    for problem, modules in (("lacks", wanted - held), ("also holds", held - wanted)):
        if modules:
            layer, name = min(modules)
            reasons.append(
                f"{TENSOR_FILE} {problem} layer {layer} {name} ({len(modules)} such modules), which"
                f" does not fit to {CONFIG_FILE} and the base: name the right base, or save it anew"
            )
    for module in sorted(held & wanted):
        layer, name = module
        rank = config.rank_of(module)
        outputs, inputs = base.projections[name]
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensor = tensors.get((module, half))
            if tensor is None:
                reasons.append(
                    f"{TENSOR_FILE} has no lora_{half} of layer {layer} {name}: save it anew"
                )
            elif tensor.shape != shape:
                reasons.append(
                    f"{TENSOR_FILE}: lora_{half} of layer {layer} {name} is {list(tensor.shape)},"
                    f" this base and rank need {list(shape)}: name the right base"
                )
    return _few(reasons)


def _few(reasons: list[str], count: int = 8) -> list[str]:
    """Return the first reasons, and a sentence with the number of further reasons."""
    if len(reasons) <= count:
        return reasons
    return [*reasons[:count], f"and {len(reasons) - count} more of the kind: see the first ones"]
