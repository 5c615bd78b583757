"""Tools for tests: servers of MCP of several versions, and HTTP addresses that misbehave."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

STATELESS = "2026-07-28"
_META = "io.modelcontextprotocol/"
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "weather", "description": "The weather", "inputSchema": _SCHEMA},
    {"name": "fails", "description": "Fails", "inputSchema": {"type": "object"}},
    {"name": "files/read é", "description": "Reads", "inputSchema": {"type": "object"}},
]


@dataclass
class McpServer:
    """A server of MCP.

    Attributes:
        versions: That it speaks; the stateless one, or some with a handshake.
        is_streaming: Whether it answers with events.
        needs_session: Whether it refuses what belongs to no session.
        token: That `Authorization` has to hold; empty: none.
        calls: Names and arguments of calls, in order.
        lists: How often it was asked for its tools.
        handshakes: How often a handshake began.
        page: Tools per page of a list.
    """

    versions: tuple[str, ...] = (STATELESS,)
    is_streaming: bool = False
    needs_session: bool = True
    token: str = ""
    ttl_ms: int = 60_000
    page: int = 100
    calls: list[tuple[str, Any]] = field(default_factory=list)
    lists: int = 0
    handshakes: int = 0
    sessions: set[str] = field(default_factory=set)
    seen: list[dict[str, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append({name.lower(): value for name, value in request.headers.items()})
        if self.token and request.headers.get("Authorization") != self.token:
            return web.json_response({"error": "unauthorized"}, status=401)
        message = await request.json()
        method, params = message["method"], message.get("params", {})
        if "id" not in message:
            return web.Response(status=202)
        if STATELESS in self.versions:
            refused = self._refused_stateless(request, message)
        else:
            refused = self._refused_with_handshake(request, method)
        if refused is not None:
            return refused
        headers = {}
        if method == "initialize":
            self.handshakes += 1
            asked = params["protocolVersion"]
            version = asked if asked in self.versions else self.versions[0]
            session = f"session-{self.handshakes}"
            self.sessions.add(session)
            headers["Mcp-Session-Id"] = session
            result: dict[str, Any] = {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "test", "version": "1"},
            }
        else:
            result = self._result(method, params)
        return await self._answered(request, message["id"], {"result": result}, headers)

    def _refused_stateless(self, request: web.Request, message: Any) -> web.Response | None:
        meta = message.get("params", {}).get("_meta", {})
        version = meta.get(f"{_META}protocolVersion")
        same = request.headers.get("MCP-Protocol-Version") == version
        if version != STATELESS or not same:
            error = {"code": -32022, "message": "unsupported", "data": {"supported": [STATELESS]}}
            return _error(message["id"], error)
        if request.headers.get("Mcp-Method") != message["method"]:
            return _error(message["id"], {"code": -32020, "message": "headers"})
        if f"{_META}clientCapabilities" not in meta:
            return _error(message["id"], {"code": -32602, "message": "capabilities"})
        return None

    def _refused_with_handshake(self, request: web.Request, method: str) -> web.Response | None:
        if method == "initialize" or not self.needs_session:
            return None
        session = request.headers.get("Mcp-Session-Id")
        if session is None:
            return web.json_response({"error": "Bad Request: no session"}, status=400)
        return None if session in self.sessions else web.Response(status=404)

    def _result(self, method: str, params: Any) -> dict[str, Any]:
        more = {"resultType": "complete"} if STATELESS in self.versions else {}
        if method == "tools/list":
            self.lists += 1
            start = int(params.get("cursor", "0"))
            listed: dict[str, Any] = {
                "tools": TOOLS[start : start + self.page],
                "ttlMs": self.ttl_ms,
            }
            if start + self.page < len(TOOLS):
                listed["nextCursor"] = str(start + self.page)
            return listed | more
        self.calls.append((params["name"], params["arguments"]))
        if params["name"] == "fails":
            content = [{"type": "text", "text": "no such file"}]
            return {"content": content, "isError": True} | more
        city = params["arguments"].get("city", "nowhere")
        return {"content": [{"type": "text", "text": f"Sunny in {city}"}]} | more

    async def _answered(
        self, request: web.Request, number: Any, said: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        message = {"jsonrpc": "2.0", "id": number, **said}
        if not self.is_streaming:
            return web.json_response(message, headers=headers)
        stream = web.StreamResponse(headers=headers | {"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
        for one in (note, message):
            await stream.write(f"event: message\ndata: {json.dumps(one)}\n\n".encode())
        await stream.write_eof()
        return stream


def _error(number: Any, error: dict[str, Any]) -> web.Response:
    return web.json_response({"jsonrpc": "2.0", "id": number, "error": error}, status=400)


@dataclass
class HttpTools:
    """HTTP addresses.

    Attributes:
        calls: Path and arguments of calls, in order.
        fail_next: How many calls of `/weather` fail with 503 before one is answered.
        headers: Of the last call.
    """

    calls: list[tuple[str, Any]] = field(default_factory=list)
    fail_next: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    redirect_to: str = "http://169.254.169.254/latest/meta-data/"
    barrier: asyncio.Barrier | None = None

    async def weather(self, request: web.Request) -> web.Response:
        arguments = await request.json() if request.can_read_body else dict(request.query)
        self.calls.append((request.path, arguments))
        self.headers = dict(request.headers)
        if self.barrier is not None:
            await self.barrier.wait()
        if self.fail_next:
            self.fail_next -= 1
            return web.json_response({"detail": "busy"}, status=503)
        return web.json_response({"sky": "sunny", "city": arguments.get("city")})

    async def huge(self, request: web.Request) -> web.StreamResponse:
        self.calls.append((request.path, None))
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(request)
        block = b" " * (1 << 20)
        for _ in range(200):
            await stream.write(block)
        return stream

    async def silent(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, None))
        await asyncio.sleep(3600)
        raise AssertionError

    async def page(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, None))
        return web.Response(text="<html>secret page</html>", content_type="text/html")

    async def redirect(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, None))
        raise web.HTTPTemporaryRedirect(self.redirect_to)

    async def bomb(self, request: web.Request) -> web.Response:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=b"\x1f\x8b", headers=headers)


@asynccontextmanager
async def serving(app: web.Application) -> AsyncGenerator[str]:
    """Serve until the block ends; yield `host:port`."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving_mcp(server: McpServer) -> AsyncGenerator[str]:
    """Serve a server of MCP; yield its URL."""
    app = web.Application()
    app.router.add_post("/mcp", server.handle)
    async with serving(app) as address:
        yield f"http://{address}/mcp"


@asynccontextmanager
async def serving_http(tools: HttpTools) -> AsyncGenerator[str]:
    """Serve HTTP tools; yield `host:port`."""
    app = web.Application()
    app.router.add_route("*", "/weather", tools.weather)
    for name in ("huge", "silent", "page", "redirect", "bomb"):
        app.router.add_route("*", f"/{name}", getattr(tools, name))
    async with serving(app) as address:
        yield address
