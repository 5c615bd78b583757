"""Serves verified chunks to other nodes: `GET /v1/artifacts/{digest}/chunks/{number}`.

Artifacts belong to tenants. A request needs a ticket of the control plane for the artifact. Without
it, the answer does not reveal whether the artifact is on this node. With mutual TLS the peer must
also be an agent. Without mutual TLS, traffic is not encrypted.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

from aiohttp import web

from replica.agent.artifacts.holdings import Holdings
from replica.agent.artifacts.peer_keys import PeerKeys
from replica.agent.artifacts.sources import FetchPace
from sluice.addresses import host_and_port
from sluice.certificates import refusal_of, server_tls
from sluice.identity import Service
from sluice.tickets import is_valid

_CHUNK = r"/v1/artifacts/{digest:[0-9a-f]{64}}/chunks/{number:\d{1,5}}"
_LINE_MAX = 256  # largest number of queued requests, while further ones are refused
_SEND_S = 30.0
_SHUTDOWN_S = 1.0
_KEEPALIVE_S = 15.0


class _Handler:
    """Serves a few chunks at a time. Further requests wait in a queue."""

    def __init__(
        self,
        holdings: Holdings,
        keys: PeerKeys,
        uploads_max: int,
        pace: FetchPace,
        count: Callable[[int], None],
    ) -> None:
        self._holdings = holdings
        self._keys = keys
        self._uploads_max = uploads_max
        self._turns = asyncio.Semaphore(uploads_max)
        self._pace = pace
        self._count = count
        self._here = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a chunk."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if self._here >= self._uploads_max + _LINE_MAX:
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text="busy\n")
        self._here += 1
        try:
            async with self._turns:
                return await self._send(request)
        finally:
            self._here -= 1

    def _refusal(self, request: web.Request) -> web.Response | None:
        if why := refusal_of(request.transport, Service.CHUNKS):
            return web.Response(status=HTTPStatus.FORBIDDEN, text=f"{why}\n")
        scheme, _, ticket = request.headers.get("Authorization", "").partition(" ")
        digest, keys = request.match_info["digest"], self._keys.known
        if ticket and not keys:  # the control plane has not sent the first keys yet
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text="no keys yet\n")
        if scheme == "Bearer" and is_valid(ticket, keys, digest, time.time()):
            return None
        return web.Response(status=HTTPStatus.FORBIDDEN, text="no ticket for this artifact\n")

    async def _send(self, request: web.Request) -> web.StreamResponse:
        digest, number = request.match_info["digest"], int(request.match_info["number"])
        content = await asyncio.to_thread(self._holdings.read, digest, number)
        if content is None:
            return web.Response(status=HTTPStatus.NOT_FOUND, text="not here\n")
        await self._pace.take(len(content))
        response = web.StreamResponse(headers={"Content-Length": str(len(content))})
        async with asyncio.timeout(_SEND_S):
            await response.prepare(request)
            await response.write(content)
            await response.write_eof()
        self._count(len(content))
        return response


@asynccontextmanager
async def serve_peers(
    address: str,
    holdings: Holdings,
    keys: PeerKeys,
    *,
    uploads_max: int,
    bytes_per_s: float,
    count: Callable[[int], None],
) -> AsyncGenerator[str]:
    """Serve while the context lasts.

    Args:
        address: host:port to listen on, where port 0 selects a free port.
        holdings: The node's whole and partial artifacts.
        keys: Keys that verify tickets.
        uploads_max: Largest number of concurrent uploads. Further requests wait in a queue.
        bytes_per_s: Largest rate of all uploads together, or 0 for no limit.
        count: Function that is called with the number of bytes of each sent chunk.

    Yields:
        The address with the port that was bound.

    Raises:
        OSError: The address is in use.
    """
    handler = _Handler(holdings, keys, uploads_max, FetchPace(bytes_per_s), count)
    application = web.Application()
    application.router.add_get(_CHUNK, handler.serve)
    runner = web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_S,
        keepalive_timeout=_KEEPALIVE_S,
    )
    await runner.setup()
    try:
        where = host_and_port(address)
        await web.TCPSite(runner, *where, ssl_context=server_tls(is_required=True)).start()
        yield f"{address.rpartition(':')[0]}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
