"""Checks the adapters of the driver `trtllm`, which TensorRT-LLM reads from their directories."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from replica.engine.artifact import ArtifactError, read_json
from replica.engine.types import RefusedError
from sluice.errors import ErrorCode

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True, slots=True)
class DirectoryAdapter:
    """A LoRA adapter in PEFT's layout in a directory of this machine.

    TensorRT-LLM reads the adapter at its first use, and again after each eviction of the adapter
    from TensorRT-LLM's cache. So the directory must stay in its place.
    """

    directory: Path
    rank: int
    memory_bytes: int


def adapter_number(digest: str) -> int:
    """Return the number of an adapter for TensorRT-LLM: 63 bits of its digest, and never 0.

    TensorRT-LLM's caches use this number as key, so different adapters must never share a number.
    """
    found = hashlib.blake2b(digest.encode(), digest_size=8).digest()
    return (int.from_bytes(found, "little") >> 1) or 1


def read_directory_adapter(digest: str, directory: Path, rank_max: int) -> DirectoryAdapter:
    """Check the adapter in a directory and return it.

    Raises:
        RefusedError: The directory is not a LoRA adapter that TensorRT-LLM can serve, or lacks a
            file.
    """
    try:
        config = read_json(directory / "adapter_config.json")
    except ArtifactError as error:
        raise _invalid(digest, str(error)) from None
    rank = config.get("r")
    if config.get("peft_type", "LORA") != "LORA":
        raise _invalid(digest, f"peft_type is {config['peft_type']!r}; only LORA is served")
    if type(rank) is not int or not 0 < rank <= rank_max:
        raise _invalid(digest, f"r is {rank!r}; 1 to {rank_max} are served")
    files = [directory / name for name in _WEIGHTS if (directory / name).is_file()]
    if not files:
        raise _invalid(digest, f"{directory} holds none of {', '.join(_WEIGHTS)}")
    return DirectoryAdapter(directory, rank, files[0].stat().st_size)


def _invalid(digest: str, message: str) -> RefusedError:
    return RefusedError(ErrorCode.ADAPTER_INVALID, f"adapter {digest[:12]}: {message}")
