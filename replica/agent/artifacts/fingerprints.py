"""Records inode, size and time of verified artifacts' files, to avoid reading them again.

A file whose inode, size and time of change equal those at its verification counts as unchanged.
Damage on the disk changes none of the three, so all files of a doubted artifact are read again.
"""

import json
import os
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

Fingerprint = dict[str, list[int]]  # name below the artifact -> inode, size in bytes, mtime in ns


def fingerprint_of(directory: Path) -> Fingerprint:
    """Return the fingerprint of the files below a directory.

    Raises:
        OSError: A file vanished, or its status cannot be read.
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
    """Stores one small file per verified artifact, whose loss only costs another verification."""

    def __init__(self, directory: Path) -> None:
        """Set the folder of the fingerprints, which is created when it is needed."""
        self._directory = directory

    def matches(self, digest: str, artifact: Path) -> bool:
        """Return whether an artifact still has the fingerprint of its verification."""
        try:
            kept = json.loads(self._path(digest).read_bytes())
            return bool(kept) and kept == fingerprint_of(artifact)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            log.warning("fingerprint_unreadable", digest=digest, error=str(error))
            return False

    def keep(self, digest: str, seen: Fingerprint) -> None:
        """Store a verified artifact's fingerprint, without which it is verified again later."""
        path = self._path(digest)
        staging = path.with_suffix(".new")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            staging.write_text(json.dumps(seen))
            staging.replace(path)
        except OSError as error:
            log.warning("fingerprint_not_kept", digest=digest, error=str(error))

    def forget(self, digest: str) -> None:
        """Delete an artifact's fingerprint, so that it is read again before its next use."""
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.json"
