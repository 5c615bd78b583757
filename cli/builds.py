"""The kinds of builds of the cores on this machine."""

from collections.abc import Mapping
from importlib.util import find_spec

# Core -> its main module. `hatch_build.py` compiles the cores.
_CORES = {"router core": "router.core.router", "engine scheduler": "replica.engine.scheduler"}


def core_builds() -> Mapping[str, str]:
    """Return for each core `compiled` (a wheel), or `plain Python` (a checkout)."""
    return {core: _build_of(module) for core, module in _CORES.items()}


def _build_of(module: str) -> str:
    spec = find_spec(module)
    is_plain = spec is not None and (spec.origin or "").endswith(".py")
    return "plain Python" if is_plain else "compiled"
