"""Manifests of artifacts, file by file and chunk by chunk. Pure.

A manifest lists the name, size and SHA-256 of each file, and the SHA-256 of each chunk of 4 MiB.
The artifact's digest can be computed from the manifest alone. Because manifests are untrusted,
every field is validated, and file names are valid relative paths on any system.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

CHUNK_BYTES = 4 << 20
FORMAT = 1
FILES_MAX = 4096
CHUNKS_MAX = 1 << 16  # 256 GiB, in a manifest of 5 MB
MANIFEST_BYTES_MAX = 16 << 20
_NAME_CHARACTERS_MAX, _DEPTH_MAX = 255, 8
_SIZE_MAX = CHUNKS_MAX * CHUNK_BYTES
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME_PART = re.compile(r"[A-Za-z0-9._+=@ -]*[A-Za-z0-9_+=@-]")  # no dot or space at the end
_EMPTY_SHA256 = hashlib.sha256().hexdigest()


class ManifestError(ValueError):
    """Raised for an invalid manifest or directory, with a message that names the fix."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive bytes of a file."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of an artifact.

    Attributes:
        name: Path relative to the artifact, with slashes.
        size_bytes: Size of the file. An empty file has no chunks.
        sha256: SHA-256 of the whole file, in hex.
        chunk_sha256s: SHA-256 of each chunk. All chunks have `CHUNK_BYTES` except the last.
    """

    name: str
    size_bytes: int
    sha256: str
    chunk_sha256s: tuple[str, ...]

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of the file in order."""
        left = self.size_bytes
        for sha256 in self.chunk_sha256s:
            yield Chunk(sha256, min(left, CHUNK_BYTES))
            left -= CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of an artifact, as `parse_manifest` or `manifest_of_directory` return them."""

    files: tuple[FileEntry, ...]

    @property
    def digest(self) -> str:
        """The artifact's digest, equal to `digest_directory` of its files."""
        found = hashlib.sha256()
        for file in self.files:
            found.update(f"{file.sha256}  {file.name}\n".encode())
        return found.hexdigest()

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(file.size_bytes for file in self.files)

    def chunks(self) -> dict[str, int]:
        """Return the size in bytes of each distinct chunk, by SHA-256."""
        return {chunk.sha256: chunk.size_bytes for file in self.files for chunk in file.chunks()}

    def missing(self, present: Collection[str]) -> list[Chunk]:
        """Return the chunks that are not in `present`, each once, in the order of the files."""
        return [Chunk(sha, size) for sha, size in self.chunks().items() if sha not in present]

    def find(self, name: str) -> FileEntry | None:
        """Return the file with a name, or None."""
        return next((file for file in self.files if file.name == name), None)

    def document(self) -> dict[str, Any]:
        """Return the manifest as a JSON object."""
        files = [
            {
                "name": file.name,
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "chunks": list(file.chunk_sha256s),
            }
            for file in self.files
        ]
        return {"format": FORMAT, "chunk_bytes": CHUNK_BYTES, "files": files}

    def canonical_json(self) -> bytes:
        """Return the canonical JSON text, equal for equal manifests."""
        return json.dumps(self.document(), sort_keys=True, separators=(",", ":")).encode()

    @property
    def sha256(self) -> str:
        """Hash of the canonical JSON, which unlike `digest` also covers sizes and chunks."""
        return hashlib.sha256(self.canonical_json()).hexdigest()


def parse_manifest(document: object) -> Manifest:
    """Return the manifest in a JSON value.

    Raises:
        ManifestError: The value is no manifest. The message names the first mistake and its file.
    """
    fields = _object(document, "a manifest", {"format", "chunk_bytes", "files"})
    if type(fields["format"]) is not int or fields["format"] != FORMAT:
        raise ManifestError(f"format is {fields['format']!r:.40}; this version reads {FORMAT}")
    if type(fields["chunk_bytes"]) is not int or fields["chunk_bytes"] != CHUNK_BYTES:
        raise ManifestError(
            f"chunk_bytes is {fields['chunk_bytes']!r:.40}; it must be {CHUNK_BYTES}"
        )
    listed = fields["files"]
    if not isinstance(listed, list):
        raise ManifestError("files is not a list")
    files = cast("list[object]", listed)
    if not 1 <= len(files) <= FILES_MAX:
        raise ManifestError(f"{len(files)} files; an artifact has 1 to {FILES_MAX}")
    return _made(_parse_file(file) for file in files)


def manifest_of_directory(directory: Path) -> Manifest:
    """Return the manifest of a directory, reading one chunk at a time.

    Raises:
        ManifestError: The directory is empty, too large, or has a file that cannot be in an
            artifact.
        OSError: A file cannot be read.
    """
    paths = sorted(directory.rglob("*"))
    for path in paths:
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            raise ManifestError(f"{name} is a symbolic link: copy its target in its place")
        if not path.is_file() and not path.is_dir():
            raise ManifestError(f"{name} is neither a file nor a directory: remove it")
    names = [path for path in paths if path.is_file()]
    if not 1 <= len(names) <= FILES_MAX:
        raise ManifestError(
            f"{directory} holds {len(names)} files; an artifact has 1 to {FILES_MAX}"
        )
    return _made(_read_file(path, path.relative_to(directory).as_posix()) for path in names)


def read_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file in pieces of `CHUNK_BYTES`. Only the last piece may be shorter."""
    while piece := file.read(CHUNK_BYTES):
        yield piece


def _made(files: Iterable[FileEntry]) -> Manifest:
    """Return the manifest of files, sorted in the order that the digest requires."""
    made = Manifest(tuple(sorted(files, key=lambda file: file.name.split("/"))))
    _check_names([file.name for file in made.files])
    sizes: dict[str, int] = {}
    count = 0
    for file in made.files:
        for chunk in file.chunks():
            count += 1
            if sizes.setdefault(chunk.sha256, chunk.size_bytes) != chunk.size_bytes:
                raise ManifestError(f"{file.name}: chunk {chunk.sha256} has two different sizes")
    if count > CHUNKS_MAX:
        raise ManifestError(f"{count} chunks; an artifact has at most {CHUNKS_MAX}")
    return made


def _read_file(path: Path, name: str) -> FileEntry:
    _check_name(name)
    whole = hashlib.sha256()
    chunks: list[str] = []
    size = 0
    with path.open("rb", buffering=0) as file:
        for piece in read_chunks(cast("BinaryIO", file)):
            size += len(piece)
            chunks.append(hashlib.sha256(piece).hexdigest())
            whole.update(piece)
    return FileEntry(name, size, whole.hexdigest(), tuple(chunks))


def _parse_file(document: object) -> FileEntry:
    fields = _object(document, "a file", {"name", "size_bytes", "sha256", "chunks"})
    name, size, sha256 = fields["name"], fields["size_bytes"], fields["sha256"]
    if not isinstance(name, str):
        raise ManifestError(f"a file's name is {name!r:.80}, not a text")
    _check_name(name)
    if type(size) is not int or not 0 <= size <= _SIZE_MAX:
        raise ManifestError(f"{name}: size_bytes is {size!r:.40}; 0 to {_SIZE_MAX} is expected")
    if not isinstance(fields["chunks"], list):
        raise ManifestError(f"{name}: chunks is not a list")
    chunks = cast("list[object]", fields["chunks"])
    for digest in (sha256, *chunks):
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ManifestError(f"{name}: {digest!r:.80} is no SHA-256 of 64 lower-case digits")
    count = -(-size // CHUNK_BYTES)
    if len(chunks) != count:
        raise ManifestError(
            f"{name}: {size} bytes are {count} chunks, but {len(chunks)} are listed"
        )
    if (count == 0 and sha256 != _EMPTY_SHA256) or (count == 1 and sha256 != chunks[0]):
        raise ManifestError(f"{name}: the SHA-256 of the file and of its only chunk differ")
    return FileEntry(name, size, cast("str", sha256), tuple(cast("list[str]", chunks)))


def _object(document: object, what: str, names: set[str]) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise ManifestError(f"{what} is not a JSON object")
    fields = cast("dict[str, Any]", document)
    if fields.keys() != names:
        wrong = ", ".join(sorted(f"{name:.40}" for name in fields.keys() ^ names)[:4])
        raise ManifestError(
            f"{what} has exactly the fields {', '.join(sorted(names))}; missing or unknown: {wrong}"
        )
    return fields


def _check_name(name: str) -> None:
    parts = name.split("/")
    if not all(_NAME_PART.fullmatch(part) for part in parts):
        raise ManifestError(
            f"{name!r:.300} cannot be a file of an artifact: names are relative, with / between"
            " parts of A-Z a-z 0-9 . _ + = @ - and space, none of which ends with a dot or a space"
        )
    if len(name) > _NAME_CHARACTERS_MAX or len(parts) > _DEPTH_MAX:
        raise ManifestError(
            f"{name:.300} is too long or too deep: {_NAME_CHARACTERS_MAX} characters and"
            f" {_DEPTH_MAX} parts are allowed"
        )


def _check_names(names: list[str]) -> None:
    """Refuse names that would collide on a case-insensitive file system."""
    files: dict[str, str] = {}
    directories: dict[str, str] = {}
    for name in names:
        folded = name.lower()
        if folded in files:
            raise ManifestError(f"{name} and {files[folded]} are the same name: rename one")
        files[folded] = name
        parts = folded.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(name.split("/")[:depth])
            known = directories.setdefault("/".join(parts[:depth]), parent)
            if known != parent:
                raise ManifestError(f"{name}: there is a directory {known}, too: rename one")
    for folded in files.keys() & directories.keys():
        raise ManifestError(f"{files[folded]} is a file and a directory: rename one")
