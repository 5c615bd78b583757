"""Checks the access rights of other users on this machine, and the capabilities of this process."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

# Bits of capabilities(7) that permit changes of owners, users and groups, signals to all processes,
# tracing and reading of all processes, and mounts.
_BITS = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
}


def can_traverse(path: Path, uid: int, gid: int) -> bool:
    """Return whether a user with only the group `gid` may enter every directory down to `path`.

    Missing directories are ignored, because the process that creates them makes them accessible.
    """
    return not closed_part(path, uid, gid)


def closed_part(path: Path, uid: int, gid: int) -> str:
    """Return the deepest directory at or above `path` that a user may not enter, or empty."""
    for directory in (path, *path.parents):
        try:
            status = directory.stat()
        except FileNotFoundError:
            continue
        if status.st_uid == uid:
            needed = stat.S_IXUSR
        elif status.st_gid == gid:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not status.st_mode & needed:
            return str(directory)
    return ""


def lacking_capabilities(names: Iterable[str]) -> list[str]:
    """Return the capabilities of `names` that this process lacks."""
    effective = _effective()
    return sorted(name for name in names if not effective >> _BITS[name] & 1)


def is_root() -> bool:
    """Return whether this process runs as root."""
    return os.geteuid() == 0


def _effective() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
