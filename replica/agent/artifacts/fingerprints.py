"""Records inode, size and time of verified artifacts' files, so that they need not be read again.

A file whose inode, size and time of modification equal those at its verification counts as
unchanged. Damage on the disk changes none of the three. So if an artifact is doubted, its
fingerprint is deleted and all its files are read again.
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
    """Stores one small file per verified artifact. Without it, the artifact is verified again."""

    def __init__(self, directory: Path) -> None:
        """Set the folder of the fingerprints, which is created when the first one is stored."""
        self._directory = directory

    def matches(self, digest: str, artifact: Path) -> bool:
        """Return whether an artifact's files are unchanged since their verification."""
        try:
            kept = json.loads(self._path(digest).read_bytes())
            return bool(kept) and kept == fingerprint_of(artifact)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            log.warning("fingerprint_unreadable", digest=digest, error=str(error))
            return False

    def keep(self, digest: str, seen: Fingerprint) -> None:
        """Store the fingerprint that an artifact had when it was verified."""
        path = self._path(digest)
        staging = path.with_suffix(".new")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            staging.write_text(json.dumps(seen))
            staging.replace(path)
        except OSError as error:
            log.warning("fingerprint_not_kept", digest=digest, error=str(error))

    def forget(self, digest: str) -> None:
        """Delete a fingerprint, so that its artifact is verified again before its next use."""
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.json"
