"""Fetches chunks from peers over HTTP, and from the store."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Self

import aiohttp

from replica.agent.artifacts.partial import Piece
from sluice.certificates import http_options, ours
from sluice.chunk_store import ChunkStore, LostChunkError, StoreDownError, open_backend
from sluice.identity import CertificateRole

STORE = ""  # node id that means the store instead of a peer
_CONNECT_S = 3.0
_BUSY_PAUSE_S = 0.2  # seconds between two requests to a busy peer


class SourceRefusedError(Exception):
    """The source cannot be reached, or does not have the chunk."""


class FetchPace:
    """Limits a transfer to a number of bytes per second."""

    def __init__(self, bytes_per_s: float) -> None:
        """Set the rate in bytes per second, or 0 for no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def take(self, size_bytes: int) -> None:
        """Wait until this many bytes may be transferred."""
        if not self._bytes_per_s:
            return
        now_s = time.monotonic()
        begin_s = max(self._free_at_s, now_s)
        self._free_at_s = begin_s + size_bytes / self._bytes_per_s
        await asyncio.sleep(begin_s - now_s)


class Sources:
    """Fetches chunks without verifying them. `Sources.open` creates this object."""

    def __init__(self, session: aiohttp.ClientSession, store: ChunkStore, pace: FetchPace) -> None:
        self._session = session
        self._store = store
        self._pace = pace
        self.bytes_from = {"peer": 0, "store": 0}

    @classmethod
    @asynccontextmanager
    async def open(cls, store_url: str, bytes_per_s: float) -> AsyncGenerator[Self]:
        """Yield the sources of a node.

        Args:
            store_url: URL of the store, in a form that `open_backend` accepts.
            bytes_per_s: Largest rate of all downloads together, or 0 for no limit.

        Raises:
            ValueError: The URL is not the URL of a store.
        """
        store = ChunkStore(open_backend(store_url))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                yield cls(session, store, FetchPace(bytes_per_s))
        finally:
            store.close()

    async def get(
        self, address: str, digest: str, number: int, piece: Piece, ticket: str = ""
    ) -> bytes:
        """Return the unverified bytes of a chunk.

        Args:
            address: host:port of a peer, or empty for the store.
            digest: Digest of the artifact.
            number: Number of the chunk.
            piece: The chunk's hash and size.
            ticket: Ticket to send to the peer.

        Raises:
            SourceRefusedError: The source does not exist, or does not have the chunk.
            TimeoutError: The source refuses connections for too long. A slow answer does not
                raise it, so the caller needs its own deadline.
        """
        await self._pace.take(piece.size_bytes)
        if address:
            scheme = "http" if ours() is None else "https"
            url = f"{scheme}://{address}/v1/artifacts/{digest}/chunks/{number}"
            content = await self._from_peer(url, ticket, piece.size_bytes)
        else:
            content = await self._from_store(piece.sha256)
        self.bytes_from["peer" if address else "store"] += len(content)
        return content

    async def _from_store(self, sha256: str) -> bytes:
        try:
            return await self._store.get(sha256)
        except LostChunkError as error:
            raise SourceRefusedError(error.message) from None
        except StoreDownError as error:
            raise TimeoutError(error.reason) from None

    async def _from_peer(self, url: str, ticket: str, size_bytes: int) -> bytes:
        headers = {"Authorization": f"Bearer {ticket}"}
        try:
            while True:
                request = self._session.get(
                    url,
                    headers=headers,
                    allow_redirects=False,
                    **http_options(CertificateRole.AGENT),
                )
                async with request as answer:
                    if answer.status == HTTPStatus.OK:
                        return await _body(answer, size_bytes)
                    if answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
                        raise SourceRefusedError(f"{answer.host} answered {answer.status}")
                await asyncio.sleep(_BUSY_PAUSE_S)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise SourceRefusedError(f"{url}: {error!r}") from None


async def _body(answer: aiohttp.ClientResponse, size_bytes: int) -> bytes:
    """Return the received bytes. A body that is too long is cut one byte after `size_bytes`."""
    parts: list[bytes] = []
    have = 0
    async for part in answer.content.iter_any():
        parts.append(part)
        have += len(part)
        if have > size_bytes:
            break
    return b"".join(parts)
