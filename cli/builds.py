"""The kind of build of the router's core on this machine."""

from importlib.util import find_spec


def core_build() -> str:
    """Return `compiled` (a wheel), or `plain Python` (a checkout)."""
    spec = find_spec("router.core.router")
    is_plain = spec is not None and (spec.origin or "").endswith(".py")
    return "plain Python" if is_plain else "compiled"
