"""Removes the shared memory of killed processes, in /dev/shm and in System V segments.

Triton has a region per replica in /dev/shm. PostgreSQL has a few bytes of System V memory as an
interlock. Both servers remove their memory at a normal stop, but cannot when they are killed.
"""

import ctypes
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

_SHM = Path("/dev/shm")  # noqa: S108 - the kernel's, not a temporary folder of ours
_SYSTEM_V = Path("/proc/sysvipc/shm")
_IPC_RMID = 0
_POLL_S = 0.05


def mapped_files(pids: Iterable[int]) -> set[Path]:
    """Return the files of /dev/shm that the processes have mapped.

    No other process uses these files, so they may be removed when the processes have ended.
    """
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.partition("/dev/shm/")[2].removesuffix(" (deleted)")  # noqa: S108
                if path:
                    found.add(_SHM / path)
    return found


def remove_files(files: Iterable[Path], prefix: str) -> list[Path]:
    """Remove these files of /dev/shm, and all files with this prefix. Returns the removed files."""
    own = set(_SHM.glob(f"{prefix}*")) if _SHM.is_dir() else set[Path]()
    removed: list[Path] = []
    for file in sorted(own.union(files)):
        with suppress(OSError):
            file.unlink()
            removed.append(file)
    return removed


def orphaned_ids(table: str, creators: Collection[int]) -> list[int]:
    """Return the System V segments that ended creators left and no process has attached.

    Args:
        table: Text of /proc/sysvipc/shm, which has a header and then rows of
            `key shmid perms size cpid lpid nattch ...`.
        creators: Ids of processes that have ended.
    """
    rows = [line.split() for line in table.splitlines()[1:]]
    return [int(row[1]) for row in rows if int(row[4]) in creators and int(row[6]) == 0]


def is_attached(table: str, creators: Collection[int]) -> bool:
    """Return whether any process is attached to a System V segment of these creators."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return any(int(row[4]) in creators and int(row[6]) > 0 for row in rows)


def remove_orphans(creators: Collection[int], patience_s: float = 5.0) -> list[int]:
    """Remove the System V segments that these ended processes created. Returns the segments' ids.

    The removal is retried, because the kernel detaches a process some time after its end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    removed: list[int] = []
    deadline = time.monotonic() + patience_s
    while True:
        try:
            table = _SYSTEM_V.read_text()
        except OSError:
            return removed
        found = orphaned_ids(table, creators)
        removed += [number for number in found if libc.shmctl(number, _IPC_RMID, None) == 0]
        if not is_attached(table, creators) or time.monotonic() >= deadline:
            return removed
        time.sleep(_POLL_S)
