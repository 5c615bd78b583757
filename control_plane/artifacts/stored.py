"""Files of artifacts, read in parts from the store's chunks. Reads block, so use a thread."""

import hashlib

import obstore

from sluice.chunk_store import Backend, chunk_path
from sluice.manifests import CHUNK_BYTES, FileEntry, Manifest


class StoredFile:
    """A file of an artifact whose chunks are in the store."""

    def __init__(self, backend: Backend, entry: FileEntry) -> None:
        self._backend = backend
        self._entry = entry

    @property
    def name(self) -> str:
        """The name of the file, relative to the artifact."""
        return self._entry.name

    @property
    def size_bytes(self) -> int:
        """The size of the whole file in bytes."""
        return self._entry.size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Return a range of the file's bytes. Raises OSError if the store lacks them."""
        assert 0 <= offset <= offset + length <= self.size_bytes
        parts: list[bytes] = []
        while length:
            index, begin = divmod(offset, CHUNK_BYTES)
            taken = min(length, CHUNK_BYTES - begin)
            path = chunk_path(self._entry.chunk_sha256s[index])
            part = bytes(obstore.get_range(self._backend, path, start=begin, length=taken))
            if len(part) != taken:
                raise OSError(f"{path} has {len(part)} bytes where {taken} should be")
            parts.append(part)
            offset, length = offset + taken, length - taken
        return b"".join(parts)

    def is_whole(self) -> bool:
        """Whether the concatenated chunks have the SHA-256 of the file.

        A file of one chunk is not read, because its hash is the verified hash of the chunk.
        """
        if len(self._entry.chunk_sha256s) <= 1:
            return True
        found = hashlib.sha256()
        for sha256 in self._entry.chunk_sha256s:
            found.update(obstore.get(self._backend, chunk_path(sha256)).bytes())
        return found.hexdigest() == self._entry.sha256


def stored_files(backend: Backend, manifest: Manifest) -> dict[str, StoredFile]:
    """Return an artifact's files by name."""
    return {entry.name: StoredFile(backend, entry) for entry in manifest.files}
