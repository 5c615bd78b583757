"""Clients of tools against real servers: addresses, bounds, and every version of MCP."""

import asyncio
import socket
from typing import Any

import pytest

from gateway.tools import http_tool
from gateway.tools.failures import ToolCallError
from gateway.tools.http_messages import OutgoingRequest
from gateway.tools.mcp_client import McpAddress, McpClient
from gateway.tools.outgoing import Outgoing
from tests.support.tool_servers import (
    STATELESS,
    HttpTools,
    McpServer,
    serving_http,
    serving_mcp,
)

pytestmark = pytest.mark.real


async def failure_of(
    outgoing: Outgoing, url: str, timeout_s: float = 5.0, method: str = "POST"
) -> ToolCallError:
    async def attempt() -> None:
        request = OutgoingRequest(method, url, b"{}")
        http_tool.result_of(await outgoing.send(request, timeout_s))

    with pytest.raises(ToolCallError) as failure:
        await attempt()
    assert "secret" not in failure.value.message
    return failure.value


async def test_bad_tools_fail_with_words_and_nothing_of_theirs_leaks() -> None:
    tools = HttpTools()
    async with serving_http(tools) as address:
        outgoing = Outgoing([address])
        try:
            url = f"http://{address}"
            assert "more than 4 MiB" in (await failure_of(outgoing, f"{url}/huge")).message
            late = await failure_of(outgoing, f"{url}/silent", 0.3)
            assert (late.message, late.may_repeat) == ("no answer within 0.3 s", True)
            assert "text/html, not JSON" in (await failure_of(outgoing, f"{url}/page")).message
            away = await failure_of(outgoing, f"{url}/redirect")
            assert "redirects are not followed" in away.message
            assert "169.254" not in away.message
            assert "compressed" in (await failure_of(outgoing, f"{url}/bomb")).message
            assert "status 404" in (await failure_of(outgoing, f"{url}/nothing")).message
            tools.fail_next = 1
            busy = await failure_of(outgoing, f"{url}/weather")
            assert (busy.message, busy.may_repeat) == ('status 503: {"detail": "busy"}', True)
        finally:
            await outgoing.close()
    outgoing = Outgoing([address])
    assert (await failure_of(outgoing, f"http://{address}/")).may_repeat
    await outgoing.close()


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "[::1]", "localhost", "169.254.169.254", "10.0.0.1", "0.0.0.0"),
        *("[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "2130706433", "127.1", "0x7f000001"),
    ],
)
async def test_no_address_inside_the_network_is_called(host: str) -> None:
    tools = HttpTools()
    async with serving_http(tools) as address:
        port = address.rpartition(":")[2]
        outgoing = Outgoing(["127.0.0.1:1", f"other:{port}"])
        try:
            failure = await failure_of(outgoing, f"http://{host}:{port}/weather", 2.0)
            assert "not public" in failure.message or "URL" in failure.message
            assert not failure.is_fault
        finally:
            await outgoing.close()
    assert not tools.calls


async def test_a_name_that_has_another_address_later_is_not_called(monkeypatch: Any) -> None:
    """Rebinding: what is connected to is what was looked at, at each connection."""
    tools = HttpTools()
    async with serving_http(tools) as address:
        port = int(address.rpartition(":")[2])
        answers = iter(["93.184.215.14", "127.0.0.1"])
        loop = asyncio.get_running_loop()
        connected: list[str] = []

        async def getaddrinfo(host: str, port: int, **_: Any) -> Any:
            assert host == "rebinds.example.com"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        connect = loop.sock_connect

        async def sock_connect(sock: socket.socket, to: Any) -> None:
            connected.append(to[0])
            if to[0] != "127.0.0.1":
                raise OSError("unreachable")
            await connect(sock, to)

        monkeypatch.setattr(loop, "sock_connect", sock_connect)
        outgoing = Outgoing([])
        try:
            url = f"http://rebinds.example.com:{port}/weather"
            first = await failure_of(outgoing, url)
            assert "connection failed" in first.message
            second = await failure_of(outgoing, url)
            assert "not public" in second.message
        finally:
            await outgoing.close()
    assert connected == ["93.184.215.14"]
    assert not tools.calls


async def test_a_host_that_an_operator_allows_is_called_with_its_port_alone() -> None:
    tools = HttpTools()
    async with serving_http(tools) as address:
        port = address.rpartition(":")[2]
        outgoing = Outgoing([f"localhost:{port}"])
        try:
            request = http_tool.request_of(
                "GET", f"http://localhost:{port}/weather?x=1", {"city": "Bern", "days": [1]}, {}
            )
            said = http_tool.result_of(await outgoing.send(request, 5.0))
            assert said == '{"sky":"sunny","city":"Bern"}'
            assert tools.calls == [("/weather", {"x": "1", "city": "Bern", "days": "[1]"})]
            assert "not public" in (await failure_of(outgoing, f"http://{address}/")).message
        finally:
            await outgoing.close()


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("version", [STATELESS, "2025-11-25", "2025-06-18", "2025-03-26"])
async def test_servers_of_every_version_are_listed_and_called(
    version: str, is_streaming: bool
) -> None:
    server = McpServer((version,), is_streaming=is_streaming, token="Bearer t", page=2)
    async with serving_mcp(server) as url:
        outgoing = Outgoing([url.removeprefix("http://").removesuffix("/mcp")])
        try:
            client = McpClient(outgoing)
            address = McpAddress(("a",), url, {"Authorization": "Bearer t"})
            tools = await client.tools(address, 5.0)
            assert [it.name for it in tools] == ["weather", "fails", "files/read é"]
            assert server.lists == 2  # pages
            assert await client.tools(address, 5.0) == tools
            assert server.lists == 2  # remembered
            said = await client.call(address, "weather", {"city": "Bern"}, 5.0)
            assert said == "Sunny in Bern"
            with pytest.raises(ToolCallError, match="no such file"):
                await client.call(address, "fails", {}, 5.0)
            await client.call(address, "files/read é", {}, 5.0)
            assert [name for name, _ in server.calls] == ["weather", "fails", "files/read é"]
            assert server.handshakes == (version != STATELESS)
            is_named = version != "2025-03-26"
            assert ("mcp-protocol-version" in server.seen[-1]) == is_named
        finally:
            await outgoing.close()


async def test_a_session_that_has_ended_is_begun_again() -> None:
    server = McpServer(("2025-06-18",))
    async with serving_mcp(server) as url:
        outgoing = Outgoing([url.removeprefix("http://").removesuffix("/mcp")])
        try:
            client, address = McpClient(outgoing), McpAddress(("a",), url, {})
            await client.call(address, "weather", {}, 5.0)
            server.sessions.clear()
            assert await client.call(address, "weather", {"city": "Rome"}, 5.0) == "Sunny in Rome"
            assert server.handshakes == 2
        finally:
            await outgoing.close()


async def test_the_time_to_live_of_a_tool_list_is_kept() -> None:
    server = McpServer(ttl_ms=0)
    async with serving_mcp(server) as url:
        outgoing = Outgoing([url.removeprefix("http://").removesuffix("/mcp")])
        try:
            client, address = McpClient(outgoing), McpAddress(("a",), url, {})
            await client.tools(address, 5.0)
            await client.tools(address, 5.0)
            assert server.lists == 2
        finally:
            await outgoing.close()


async def test_a_server_that_is_none_of_mcp_says_so() -> None:
    tools = HttpTools()
    async with serving_http(tools) as address:
        outgoing = Outgoing([address])
        try:
            client = McpClient(outgoing)
            for path, message in (("page", "not MCP"), ("weather", "not MCP"), ("huge", "MiB")):
                with pytest.raises(ToolCallError, match=message) as failure:
                    await client.tools(McpAddress((path,), f"http://{address}/{path}", {}), 5.0)
                assert "secret" not in failure.value.message
        finally:
            await outgoing.close()
