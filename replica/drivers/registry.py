"""Loads an engine by the name of its driver, from the table of all drivers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replica.engine.driver import Driver

Loader = Callable[[Path | None, str, Mapping[str, Any]], Driver]


def _openvino(directory: Path | None, base_digest: str, options: Mapping[str, Any]) -> Driver:
    # a slow import, which other engines do not need
    from replica.drivers.openvino import load_openvino

    if directory is None:
        raise ValueError("the engine openvino needs a base artifact; import one on this node")
    return load_openvino(directory, base_digest, options)


def _sim(directory: Path | None, base_digest: str, options: Mapping[str, Any]) -> Driver:
    from replica.drivers.sim import load_sim

    return load_sim(directory, base_digest, options)


def _trtllm(directory: Path | None, base_digest: str, options: Mapping[str, Any]) -> Driver:
    # a slow import, which succeeds only in images for GPUs
    from replica.drivers.trtllm import load_trtllm

    if directory is None:
        raise ValueError("the engine trtllm needs a base artifact; import one on this node")
    return load_trtllm(directory, base_digest, options)


LOADERS: Mapping[str, Loader] = {"openvino": _openvino, "sim": _sim, "trtllm": _trtllm}


def load_driver(
    engine: str, directory: Path | None, base_digest: str, options: Mapping[str, Any]
) -> Driver:
    """Return the loaded engine.

    Args:
        engine: Name in `LOADERS`.
        directory: Directory of the base artifact, or None if the base is not on the node. Only
            engines without weights accept None.
        base_digest: Digest of the base, which is part of every prefix hash.
        options: Options of the engine. Unknown options are refused.

    Raises:
        ValueError: The driver cannot serve. The message names the remedy.
    """
    loader = LOADERS.get(engine)
    if loader is None:
        raise ValueError(f"unknown engine {engine!r}; known are {', '.join(LOADERS)}")
    return loader(directory, base_digest, options)
