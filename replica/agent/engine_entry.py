"""Starts a program as another user: `python -I -S engine_entry.py ENTRY PROGRAM ARGUMENT...`.

ENTRY is a JSON object. Its `uid` is the user and group, `closed` maps a directory to {`trees`,
`links`} as in `engine_view`, and `environment` has variables for the program only. This script
must run as root. The program replaces the script in the same process. The script imports only the
standard library, because it runs before each engine starts.
"""

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 1 << 19
_PR_SET_NO_NEW_PRIVS = 38
# the mounted file system contains only directories and links, which need a few pages
_SHELL_OPTIONS = "mode=0755,size=1m"


def main() -> None:
    """Prepare the process according to ENTRY, and replace it by the program."""
    entry = json.loads(sys.argv[1])
    program = sys.argv[2:]
    try:
        if entry["closed"]:
            open_view(entry["closed"])
        become(entry["uid"])
        os.execve(program[0], program, {**os.environ, **entry["environment"]})  # noqa: S606
    except OSError as error:
        sys.exit(f"error: {program[0]} could not be started as user id {entry['uid']}: {error}")


def open_view(closed: Mapping[str, Any]) -> None:
    """Replace each closed directory by a mount of its trees and links, in a new namespace."""
    here = str(Path.cwd())
    _checked(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    _mount(None, "/", None, _MS_REC | _MS_SLAVE)
    for directory, found in closed.items():
        # The trees are opened in the new namespace, because handles of the old namespace could not
        # be mounted here.
        opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in found["trees"]}
        are_files = {path for path in opened if not Path(path).is_dir()}
        _mount("tmpfs", directory, "tmpfs", _MS_NOSUID | _MS_NODEV, _SHELL_OPTIONS)
        for path, handle in opened.items():
            _make_place(Path(path), is_file=path in are_files)
            _mount(f"/proc/self/fd/{handle}", path, None, _MS_BIND | _MS_REC)
            os.close(handle)
        for path, target in found["links"].items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(path):  # a link inside a tree exists already
                Path(path).symlink_to(target)
        _mount(None, directory, None, _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir(here)  # enters the mount, because the working directory is still the covered directory


def become(uid: int) -> None:
    """Change to this user forever, without groups, capabilities or set-user-id programs."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def _make_place(path: Path, *, is_file: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_file:
        path.touch()
    else:
        path.mkdir(exist_ok=True)


_LIBC = ctypes.CDLL(None, use_errno=True)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if it is None else it.encode() for it in (source, target, kind)]
    done = _LIBC.mount(*texts, ctypes.c_ulong(flags), data.encode() or None)
    _checked(done, f"mount {source or ''} on {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    os.umask(0o022)
    main()
