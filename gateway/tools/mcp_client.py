"""A client for MCP servers (Model Context Protocol) that caches their versions and tools."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from gateway.tools.failures import ToolCallError
from gateway.tools.http_messages import OutgoingReply, OutgoingRequest, require_ok
from gateway.tools.mcp_protocol import (
    TOOLS_MAX,
    McpSession,
    McpTool,
    handshake,
    initialized,
    output_of,
    request_of,
    result_of,
    session_of,
    tools_of,
    version_instead,
)
from gateway.tools.outgoing import Outgoing

_SERVERS_MAX = 1024  # maximum number of servers whose state is cached
_PAGES_MAX = 16


@dataclass(slots=True)
class _Server:
    """The cached state of one MCP server for one caller."""

    session: McpSession = field(default_factory=McpSession)
    is_known: bool = False
    tools: Sequence[McpTool] = ()
    fresh_until_s: float = -1.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class McpAddress:
    """An MCP server with the secrets of one caller.

    Attributes:
        key: Cache key of the server, which differs for different secrets.
        url: URL of the server.
        secrets: Secret headers to send with each request.
    """

    key: tuple[str, ...]
    url: str
    secrets: Mapping[str, str] = field(repr=False)


class McpClient:
    """Calls MCP servers."""

    def __init__(self, outgoing: Outgoing) -> None:
        """`outgoing` sends the requests to all servers."""
        self._outgoing = outgoing
        self._servers: dict[tuple[str, ...], _Server] = {}
        self._numbers = count(1)

    async def tools(self, address: McpAddress, timeout_s: float) -> Sequence[McpTool]:
        """Return the tools of a server, from the cached list while the list is valid.

        Raises:
            ToolCallError: The tools could not be listed.
        """
        server = self._server(address)
        async with server.lock:
            if time.monotonic() < server.fresh_until_s:
                return server.tools
            tools: list[McpTool] = []
            cursor, ttl_ms = "", 0
            for _ in range(_PAGES_MAX):
                params = {"cursor": cursor} if cursor else {}
                result = await self._request(server, address, "tools/list", params, timeout_s)
                page, cursor, ttl_ms = tools_of(result)
                tools += page
                if not cursor or len(tools) >= TOOLS_MAX:
                    break
            server.tools = tools[:TOOLS_MAX]
            server.fresh_until_s = time.monotonic() + ttl_ms / 1000
            return server.tools

    async def call(
        self, address: McpAddress, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> str:
        """Call a tool and return its output, or raise ToolCallError if the call failed."""
        server = self._server(address)
        params = {"name": name, "arguments": arguments}
        return output_of(await self._request(server, address, "tools/call", params, timeout_s))

    async def _request(
        self,
        server: _Server,
        address: McpAddress,
        method: str,
        params: Mapping[str, Any],
        timeout_s: float,
    ) -> Mapping[str, Any]:
        """Return the result of a request, sent in a protocol version that the server supports."""
        ends_at_s = time.monotonic() + timeout_s
        session, number = server.session, next(self._numbers)
        asked = request_of(address.url, address.secrets, session, method, params, number)
        reply = await self._send(asked, ends_at_s)
        version = version_instead(reply, session, number, is_known=server.is_known)
        if version:
            server.session = session = await self._shake_hands(address, version, ends_at_s)
            asked = request_of(address.url, address.secrets, session, method, params, number)
            reply = await self._send(asked, ends_at_s)
        result = result_of(reply, number)
        server.is_known = True
        return result

    async def _shake_hands(self, address: McpAddress, version: str, ends_at_s: float) -> McpSession:
        url, secrets = address.url, address.secrets
        session = session_of(await self._send(handshake(url, secrets, version), ends_at_s))
        require_ok(await self._send(initialized(url, secrets, session), ends_at_s))
        return session

    async def _send(self, request: OutgoingRequest, ends_at_s: float) -> OutgoingReply:
        left_s = ends_at_s - time.monotonic()
        if left_s <= 0:
            raise ToolCallError("no answer in time", may_repeat=True)
        return await self._outgoing.send(request, left_s)

    def _server(self, address: McpAddress) -> _Server:
        known = self._servers.get(address.key)
        if known is None:
            while len(self._servers) >= _SERVERS_MAX:
                del self._servers[next(iter(self._servers))]
            known = self._servers[address.key] = _Server()
        return known
