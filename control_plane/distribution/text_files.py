"""Reads small files of bases for gateways, which cannot reach the store. Concurrency is limited."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from sqlalchemy.exc import DBAPIError

from control_plane.database import Database, DatabaseDownError
from control_plane.distribution import repository
from control_plane.fields import is_digest
from sluice.base_files import TEXT_FILE_BYTES_MAX, TEXT_FILES
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.manifests import FileEntry, parse_manifest

# Largest numbers of concurrent reads and of waiting reads. Each concurrent read has a chunk of 4
# MiB in memory. A caller that is refused because the queue is full retries later.
_READS_MAX, _WAITING_MAX = 4, 64
_PIECE_BYTES = 1 << 20

# The function returns the bytes of a chunk, for the chunk's SHA-256. It raises PlatformError if the
# chunk cannot be read.
ReadChunk = Callable[[str], Awaitable[bytes]]


class TextFiles:
    """Reads files of bases from verified chunks of the store."""

    def __init__(self, database: Database, read_chunk: ReadChunk) -> None:
        """Create the reader, with the sources of manifests and of chunks."""
        self._database = database
        self._read_chunk = read_chunk
        self._reads = asyncio.Semaphore(_READS_MAX)
        self._open = 0

    async def read(self, digest: str, name: str) -> AsyncGenerator[bytes]:
        """Yield a file in pieces of at most 1 MiB.

        Raises:
            PlatformError: INVALID_REQUEST for a file that may not be read, or NOT_FOUND if there is
                no such file. OVERLOADED if too many reads are waiting, or UNAVAILABLE if the store
                or the database is down.
        """
        if not is_digest(digest) or name not in TEXT_FILES:
            message = f"digest is no SHA-256 in hex, or name none of {', '.join(TEXT_FILES)}"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message)
        if self._open >= _READS_MAX + _WAITING_MAX:
            raise PlatformError(
                ErrorCode.OVERLOADED, "too many files are read at once; try again later"
            )
        self._open += 1
        try:
            async with self._reads:
                entry = await self._find(digest, name)
                for sha256 in entry.chunk_sha256s:
                    content = await self._read_chunk(sha256)
                    for begin in range(0, len(content), _PIECE_BYTES):
                        yield content[begin : begin + _PIECE_BYTES]
        finally:
            self._open -= 1

    async def _find(self, digest: str, name: str) -> FileEntry:
        try:
            document = await self._database.run(
                lambda connection: repository.manifest(connection, digest)
            )
        except (DatabaseDownError, DBAPIError):
            message = "the database cannot be reached"
            raise PlatformError(ErrorCode.UNAVAILABLE, message) from None
        if document is None:
            raise PlatformError(ErrorCode.NOT_FOUND, f"no artifact {digest}")
        entry = await asyncio.to_thread(lambda: parse_manifest(document).find(name))
        if entry is None:
            raise PlatformError(ErrorCode.NOT_FOUND, f"artifact {digest} has no {name}")
        if entry.size_bytes > TEXT_FILE_BYTES_MAX:
            message = f"{name} of artifact {digest} is larger than {TEXT_FILE_BYTES_MAX} bytes"
            raise PlatformError(ErrorCode.INVALID_REQUEST, message)
        return entry
