"""Inode, size and time of verified artifacts' files, so that a second look need not read them.

A file that has the inode, size and time of change that it had when it was verified is taken to be
the same one. A disk that rots changes none of the three: after a doubt everything is read again.
"""

import json
import os
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

Fingerprint = dict[str, list[int]]  # name below the artifact -> inode, size in bytes, mtime in ns


def fingerprint_of(directory: Path) -> Fingerprint:
    """Return what the files below a directory look like.

    Raises:
        OSError: A file vanished, or cannot be looked at.
    """
    found: Fingerprint = {}
    for root, _, names in os.walk(directory):
        for name in names:
            path = Path(root) / name
            status = path.lstat()
            found[str(path.relative_to(directory))] = [
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
            ]
    return found


class Fingerprints:
    """One small file per verified artifact. A missing one costs a reading, never a wrong answer."""

    def __init__(self, directory: Path) -> None:
        """Take the folder that they lie in; it is made when it is needed."""
        self._directory = directory

    def matches(self, digest: str, artifact: Path) -> bool:
        """Return whether an artifact looks as it did when it was verified."""
        try:
            kept = json.loads(self._path(digest).read_bytes())
            return bool(kept) and kept == fingerprint_of(artifact)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            log.warning("fingerprint_unreadable", digest=digest, error=str(error))
            return False

    def keep(self, digest: str, seen: Fingerprint) -> None:
        """Write down what a verified artifact looks like; a full disk costs another reading."""
        path = self._path(digest)
        staging = path.with_suffix(".new")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            staging.write_text(json.dumps(seen))
            staging.replace(path)
        except OSError as error:
            log.warning("fingerprint_not_kept", digest=digest, error=str(error))

    def forget(self, digest: str) -> None:
        """Have an artifact read again before its next use."""
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.json"
