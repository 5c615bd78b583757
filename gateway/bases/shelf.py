"""Stores small files of bases on this machine's disk, for all workers. All functions block.

A base is stored completely or not at all. Its files are written to a temporary directory, which one
rename moves to the final place. Writers hold a file lock, which the system releases if they are
killed. Files are compared with their hashes before they are read.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from sluice.ids import new_id

_LOCK, _STAGING, _GONE = ".lock", ".staging", ".gone"
_SUMS = "SHA256SUMS"  # a file with one line `sha256 name` for each file of the base
# Errors that prove that a base is damaged, because a file or its listed name is invalid. Other
# errors may be temporary, and removing the base would affect all workers.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


class BaseShelf:
    """The directory of bases. If it is full, a new base replaces the least recently used ones."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        """Set the directory, which is created at its first use, and the bound on its size."""
        self._directory = directory
        self._bytes_max = bytes_max

    def find(self, digest: str) -> Path:
        """Return the directory of an undamaged base.

        Raises:
            FileNotFoundError: The base is not stored here, or was damaged and has been removed.
            OSError: The base cannot be read now.
        """
        path = self._directory / digest
        if not _is_whole(path):
            if path.exists():  # the stored base is damaged
                self._remove(path)
            raise FileNotFoundError(f"base {digest} is not in {self._directory}")
        with suppress(FileNotFoundError):  # another process may have removed the base
            os.utime(path)
        return path

    def has(self, digest: str) -> bool:
        """Return whether a base is stored, even if it is damaged."""
        return (self._directory / digest).is_dir()

    @contextmanager
    def locked(self) -> Generator[bool]:
        """Hold the lock while the block runs. Yields False if another process holds the lock."""
        self._directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def put(self, digest: str, files: Mapping[str, bytes]) -> None:
        """Add a base. The caller must hold the lock and have verified the files.

        Raises:
            OSError: The base cannot be written, or is larger than the shelf.
        """
        sums = "".join(f"{_sha256(content)}  {name}\n" for name, content in files.items())
        written = {**files, _SUMS: sums.encode()}
        size_bytes = sum(map(len, written.values()))
        if size_bytes > self._bytes_max:
            raise OSError(f"base {digest} has {size_bytes} bytes of small files; that is too much")
        self._tidy()
        self._make_room(self._bytes_max - size_bytes)
        staging = self._directory / _STAGING
        staging.mkdir()
        for name, content in written.items():
            _write(staging / name, content)
        for directory in {(staging / name).parent for name in written}:
            _sync(directory)
        staging.rename(self._directory / digest)
        _sync(self._directory)

    def _tidy(self) -> None:
        """Remove the unfinished files that killed processes have left."""
        for left in (self._directory / _STAGING, *self._directory.glob(f"{_GONE}*")):
            shutil.rmtree(left, ignore_errors=True)

    def _make_room(self, bytes_max: int) -> None:
        found = [(path, _used(path)) for path in self._directory.iterdir() if path.is_dir()]
        total = sum(size_bytes for _, (_, size_bytes) in found)
        for path, (_, size_bytes) in sorted(found, key=lambda item: item[1]):
            if total <= bytes_max:
                return
            self._remove(path)
            total -= size_bytes

    def _remove(self, path: Path) -> None:
        """Remove a base atomically, so that a concurrent reader reads either all files or none."""
        gone = self._directory / new_id(_GONE)
        with suppress(FileNotFoundError):  # another process has removed the base first
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    """Return whether all files are undamaged, or raise OSError if this cannot be checked now."""
    try:
        lines = (path / _SUMS).read_text().splitlines()
        for line in lines:
            sha256, _, name = line.partition("  ")
            if _sha256((path / name).read_bytes()) != sha256:
                return False
    except ValueError:  # the file is not text, or a line has no valid file name
        return False
    except OSError as error:
        if error.errno in _DAMAGE:
            return False
        raise
    return bool(lines)


def _used(path: Path) -> tuple[float, int]:
    """Return the time of a base's last use and its size in bytes, or zeros if it was removed."""
    try:
        files = (file for file in path.rglob("*") if file.is_file())
        return path.stat().st_mtime, sum(file.stat().st_size for file in files)
    except FileNotFoundError:
        return 0.0, 0


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
