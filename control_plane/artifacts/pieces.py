"""Receives the chunks of uploads, and verifies, stores and records each chunk."""

import asyncio
import hashlib

from aiohttp import web

from control_plane.artifacts import uploads
from control_plane.database import Database
from sluice.chunk_store import ChunkStore
from sluice.errors import BadRequestError, ErrorCode, PlatformError, RejectedError

_RUNNING_MAX = 32  # Largest number of concurrent chunks. A chunk uses up to 4 MiB of memory.
_READ_TIMEOUT_S = 60.0


class Pieces:
    """Writes chunks to the store, safe against a crash at any point.

    The chunk is first reserved, so that no sweep removes it, then stored atomically, and then
    recorded as present in its upload. After a crash in between, the upload still lacks the chunk.
    """

    def __init__(self, database: Database, store: ChunkStore) -> None:
        self._database = database
        self._store = store
        self._running = 0

    async def take(self, request: web.Request, upload_id: str, sha256: str, size: int) -> None:
        """Read a chunk from a request, and store it.

        Raises:
            RejectedError: Too many chunks are being read.
            BadRequestError: The chunk has a different size or hash.
            PlatformError: The store is down, or a sweep is removing the chunk.
        """
        if self._running >= _RUNNING_MAX:
            message = f"{_RUNNING_MAX} chunks are being read: send this one again"
            raise RejectedError(ErrorCode.OVERLOADED, message, retry_after_s=1.0)
        self._running += 1
        try:
            content = await _read(request, sha256, size)
            await self.keep(sha256, content)
            if not await self._database.run(lambda found: uploads.have(found, upload_id, sha256)):
                raise _collected(sha256)
        finally:
            self._running -= 1

    async def keep(self, sha256: str, content: bytes) -> None:
        """Store a chunk whose hash was verified. Raises PlatformError as `take` does."""
        size = len(content)
        if not await self._database.run(lambda found: uploads.reserve(found, sha256, size)):
            raise _collected(sha256)
        await self._store.put(sha256, content)


def _collected(sha256: str) -> PlatformError:
    message = f"an older chunk {sha256} is just being deleted: send it again"
    return PlatformError(ErrorCode.UNAVAILABLE, message, retry_after_s=1.0)


async def _read(request: web.Request, sha256: str, size: int) -> bytes:
    """Return the body of a request, at most `size` bytes, which must be the given chunk."""
    length = request.content_length
    if length is not None and length != size:
        raise _wrong(sha256, f"has {size} bytes, not {length}")
    digest = hashlib.sha256()
    pieces: list[bytes] = []
    held = 0
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            async for piece in request.content.iter_any():
                held += len(piece)
                if held > size:
                    raise _wrong(sha256, f"has {size} bytes, more were sent")
                digest.update(piece)
                pieces.append(piece)
    except TimeoutError:
        raise _wrong(sha256, f"did not arrive within {_READ_TIMEOUT_S:g} s") from None
    if held != size:
        raise _wrong(sha256, f"has {size} bytes, not {held}")
    if digest.hexdigest() != sha256:
        raise _wrong(
            sha256,
            "has another SHA-256: it changed on its way, or after it was read; send it again",
        )
    return b"".join(pieces)


def _wrong(sha256: str, problem: str) -> BadRequestError:
    return BadRequestError(ErrorCode.INVALID_REQUEST, f"chunk {sha256} {problem}", param="chunk")
