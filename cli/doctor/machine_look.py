"""Collects the facts about this machine for `sluice doctor`."""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.doctor.machine import MachineFacts, is_open_to_others
from cli.stack.errors import StackError
from cli.stack.home import Home
from cli.stack.ports import listener_of
from cli.stack.preflight import missing_wheels, triton_problems
from cli.stack.state import is_supervised, read_state
from sluice.engines import OPENVINO
from sluice.process import port_is_free

_HOST = "127.0.0.1"


def look_at_machine(home: Home, ports: Sequence[int]) -> MachineFacts:
    """Return the facts of this machine, without starting or changing anything.

    Args:
        home: Folder of the local stack.
        ports: Ports that `sluice up` needs.
    """
    state = read_state(home)
    runs = state is not None and is_supervised(state)
    return MachineFacts(
        platform=f"{sys.platform} {platform.machine()}",
        missing_wheels=missing_wheels(),
        engine_problems=_engine_problems(),
        memory_bytes=_memory_bytes(),
        disk_bytes=_disk_bytes(home.root),
        home=str(home.root),
        home_problem=_home_problem(home.root),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        readable_secrets=_readable_secrets(home),
        holders={port: listener_of(port) for port in ports if not port_is_free(_HOST, port)},
        runs=runs,
    )


def _engine_problems() -> Sequence[str]:
    if missing_wheels():
        return ()  # another check reports this
    try:
        return triton_problems([OPENVINO.name])
    except (StackError, OSError) as error:
        return [str(error)]


def _memory_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "")
    return int(found) << 10 if found.isdigit() else None


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _disk_bytes(root: Path) -> int | None:
    try:
        return shutil.disk_usage(_existing(root)).free
    except OSError:
        return None


def _home_problem(root: Path) -> str:
    place = _existing(root)
    if not place.is_dir():
        return f"{place} is no folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def _readable_secrets(home: Home) -> list[str]:
    contexts = home.context_file("any").parent
    files = [home.env_file, home.secrets_file, *sorted(contexts.glob("*.env"))]
    found: list[str] = []
    for file in files:
        try:
            mode = file.stat().st_mode
        except OSError:
            continue
        if is_open_to_others(mode):
            found.append(str(file))
    return found
