"""Stores a partial artifact as sparse files, with a journal of the verified chunks.

The artifact is in `<artifacts>/.partial/<digest>/`. Its `files/` is filled chunk by chunk in any
order, and is renamed when complete. All methods block, so callers run them in threads.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from replica.agent.artifacts.journal import Journal
from sluice.artifacts import digest_directory
from sluice.ids import new_id
from sluice.manifests import CHUNK_BYTES, Manifest

# Prefix of small files that are being written. If one exists at the start, an agent was killed.
STAGING = ".staging"


class CorruptChunkError(ValueError):
    """The bytes of a chunk do not have the chunk's hash."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk, and the places of its bytes, each a file name and an offset in bytes."""

    sha256: str
    size_bytes: int
    places: tuple[tuple[str, int], ...]


def pieces_of(manifest: Manifest) -> tuple[Piece, ...]:
    """Return the distinct chunks of an artifact, in the order of their numbers."""
    places: dict[str, list[tuple[str, int]]] = {}
    for file in manifest.files:
        for number, chunk in enumerate(file.chunks()):
            places.setdefault(chunk.sha256, []).append((file.name, number * CHUNK_BYTES))
    sizes = manifest.chunks()
    return tuple(Piece(sha, size, tuple(places[sha])) for sha, size in sizes.items())


def read_piece(directory: Path, piece: Piece) -> bytes:
    """Return a chunk's bytes from a directory. Raises OSError if a byte is missing."""
    name, offset = piece.places[0]
    file = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.pread(file, piece.size_bytes, offset)
    finally:
        os.close(file)
    if len(content) != piece.size_bytes:
        raise OSError(f"{directory / name} is too short")
    return content


class Partial:
    """A partial artifact. Any number of threads may write its chunks."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        """Continue the partial artifact in `root`, or begin a new one if there is none.

        Args:
            root: The artifact's own directory, created if missing.
            manifest: Manifest of the artifact.

        Raises:
            OSError: The disk is full, or access is denied.
        """
        self.root = root
        self.manifest = manifest
        self.digest = manifest.digest
        self.pieces = pieces_of(manifest)
        self.files = root / "files"
        for file in manifest.files:
            path = self.files / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        self._journal = Journal.open(root / "journal", self.digest, len(self.pieces))
        self._lock = threading.Lock()
        self._written: set[int] = set()
        self._commit_lock = threading.Lock()
        self._is_closed = False

    @property
    def held(self) -> int:
        """The chunks that are verified and synced, as a bit mask."""
        return self._journal.held

    @property
    def missing(self) -> int:
        """The chunks that are missing, as a bit mask."""
        return ((1 << len(self.pieces)) - 1) & ~self._journal.held

    def write(self, number: int, content: bytes) -> None:
        """Write a chunk and sync it, so that the chunk survives a crash.

        Threads that write at the same time share the syncs of files.

        Raises:
            CorruptChunkError: The bytes do not match the chunk's hash.
            OSError: The disk is full, access is denied, or the disk fails.
        """
        piece = self.pieces[number]
        if hashlib.sha256(content).hexdigest() != piece.sha256:
            raise CorruptChunkError(f"chunk {piece.sha256} differs from the bytes that came")
        for name, offset in piece.places:
            _write_at(self.files / name, content, offset)
        with self._lock:
            self._written.add(number)
        with self._commit_lock:
            if self._is_closed:
                raise OSError(f"{self.root} is closed")
            with self._lock:
                written, self._written = sorted(self._written), set()
            if not written:
                return  # the sync of another thread included this chunk
            try:
                for name in {name for i in written for name, _ in self.pieces[i].places}:
                    _sync(self.files / name)
                self._journal.add(written)
            except OSError:
                with self._lock:
                    self._written.update(written)
                raise

    def read(self, number: int) -> bytes:
        """Return the bytes of a chunk in `held`. Raises OSError if they cannot be read."""
        return read_piece(self.files, self.pieces[number])

    def seal(self) -> Path:
        """Verify and sync the whole artifact, and return its directory for the caller to rename.

        Raises:
            CorruptChunkError: The disk returned other bytes than those written. All files have
                been removed.
            OSError: The artifact cannot be read.
        """
        assert not self.missing
        if digest_directory(self.files) != self.digest:
            self.remove()
            raise CorruptChunkError(f"the disk damaged artifact {self.digest}")
        for directory in {self.files, *(path.parent for path in self._paths())}:
            _sync(directory)
        return self.files

    def remove(self) -> None:
        """Remove the journal and then all files, so that no journal lists missing chunks."""
        self.close()
        (self.root / "journal").unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def close(self) -> None:
        """Close the journal. Later writes raise OSError."""
        with self._commit_lock:
            if not self._is_closed:
                self._is_closed = True
                self._journal.close()

    def _paths(self) -> Iterator[Path]:
        for file in self.manifest.files:
            yield self.files / file.name


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file atomically, even if two processes write it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(new_id(STAGING))
    try:
        _write_at(staging, content, 0, flags=os.O_CREAT | os.O_EXCL)
        _sync(staging)
        staging.replace(path)
    except OSError:
        staging.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _write_at(path: Path, content: bytes, offset: int, *, flags: int = 0) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644)
    try:
        view = memoryview(content)
        while view:
            written = os.pwrite(file, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(file)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def bitmap(chunks: int) -> bytes:
    """Return a set of chunks, given as a bit mask, in the form of the wire."""
    return chunks.to_bytes((chunks.bit_length() + 7) // 8, "little")


def members(mask: int) -> Iterable[int]:
    """Return the numbers of the set bits of a mask in ascending order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
