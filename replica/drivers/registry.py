"""Loads an engine by the name of its driver, which is a name in the table of all engines."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from replica.engine.driver import Driver
from sluice.engines import ENGINES, names
from sluice.profiles import FRAMES

DRIVERS = names(lambda engine: engine.profile is FRAMES)


def load_driver(
    engine: str, directory: Path | None, base_digest: str, options: Mapping[str, Any]
) -> Driver:
    """Return the loaded engine.

    Args:
        engine: Name in `DRIVERS`.
        directory: Directory of the base artifact, or None if the base is not on the node. Only
            engines without weights accept None.
        base_digest: Digest of the base, which is part of every prefix hash.
        options: Options of the engine. Unknown options are refused.

    Raises:
        ValueError: The driver cannot serve. The message names the remedy.
    """
    if engine not in DRIVERS:
        raise ValueError(f"unknown engine {engine!r}; known are {', '.join(DRIVERS)}")
    if directory is None and ENGINES[engine].needs_base:
        raise ValueError(f"the engine {engine} needs a base artifact; import one on this node")
    # The import is slow for some engines, and succeeds for trtllm only in images for GPUs.
    module = import_module(f"replica.drivers.{engine}")
    return getattr(module, f"load_{engine}")(directory, base_digest, options)
