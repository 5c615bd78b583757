"""Records the chunks of a partial artifact that are verified and on the disk, in a journal file.

The file only grows. It has a header with the artifact's digest, and then one record per chunk. When
a journal is opened, bytes from the first invalid record on are dropped. So a crash during a write
may lose the last records, but never records a chunk that is not on the disk.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import Self
from zlib import crc32

# number of the chunk, and a checksum of this number and the artifact's digest
_RECORD = Struct("<II")
_HEADER_BYTES = 32


class Journal:
    """The journal of one artifact. Its methods block, so callers run them in a thread."""

    def __init__(self, file: int, seed: int, held: int) -> None:
        self._file = file
        self._seed = seed
        self.held = held

    @classmethod
    def open(cls, path: Path, digest: str, count: int) -> Self:
        """Open the journal, or create it if there is none.

        Args:
            path: Path of the file.
            digest: Digest of the artifact. A journal of another artifact is overwritten.
            count: Number of chunks of the artifact.

        Returns:
            The journal. Bit i of its `held` is set if chunk i is on the disk.

        Raises:
            OSError: The file cannot be read or written.
        """
        header = bytes.fromhex(digest)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            content = os.pread(file, os.fstat(file).st_size, 0)
            seed = crc32(header)
            held, length = _read(content, header, seed, count)
            os.ftruncate(file, length)
            os.lseek(file, length, os.SEEK_SET)
            if not length:
                os.write(file, header)
                os.fsync(file)
        except BaseException:
            os.close(file)
            raise
        return cls(file, seed, held)

    def add(self, chunks: Iterable[int]) -> None:
        """Record chunks whose bytes are already synced. Raises OSError if the write fails."""
        numbers = list(chunks)
        records = b"".join(_RECORD.pack(i, _checksum(i, self._seed)) for i in numbers)
        begin = os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            while records:
                records = records[os.write(self._file, records) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, begin)
            os.lseek(self._file, begin, os.SEEK_SET)
            raise
        for number in numbers:
            self.held |= 1 << number

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _read(content: bytes, header: bytes, seed: int, count: int) -> tuple[int, int]:
    """Return a bit mask of the recorded chunks, and the length of the valid part in bytes."""
    if content[:_HEADER_BYTES] != header:
        return 0, 0
    held, length = 0, _HEADER_BYTES
    while length + _RECORD.size <= len(content):
        number, checksum = _RECORD.unpack_from(content, length)
        if number >= count or checksum != _checksum(number, seed):
            break
        held |= 1 << number
        length += _RECORD.size
    return held, length


def _checksum(number: int, seed: int) -> int:
    return crc32(number.to_bytes(4, "little"), seed)
