"""Content-addressed artifacts on a node, in directories named by the digest of their files.

In an artifact folder, a directory `<digest>/` is complete whenever it exists. The digest covers the
relative names and the bytes of all files, so equal directories have equal names on all nodes.
"""

import hashlib
import shutil
from pathlib import Path

from sluice.ids import new_id


def digest_directory(directory: Path) -> str:
    """Return the hex SHA-256 of a directory's sorted lines `sha256  relative/name`."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{directory} holds no files; an artifact needs at least one")
    manifest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        manifest.update(f"{content}  {path.relative_to(directory).as_posix()}\n".encode())
    return manifest.hexdigest()


def artifact_path(root: Path, digest: str) -> Path:
    """Return the directory of a digest, or raise FileNotFoundError if the node lacks it."""
    path = root / digest
    if not path.is_dir():
        raise FileNotFoundError(f"artifact {digest} is not in {root}; import it first")
    return path


def import_directory(source: Path, root: Path) -> str:
    """Copy a directory into the artifact folder, atomically, and return its digest."""
    digest = digest_directory(source)
    target = root / digest
    if target.is_dir():
        return digest
    root.mkdir(parents=True, exist_ok=True)
    staging = root / new_id(".staging")
    shutil.copytree(source, staging)
    try:
        staging.rename(target)  # fails if another process was first, whose copy is equal
    except OSError:
        shutil.rmtree(staging)
        if not target.is_dir():
            raise
    return digest
