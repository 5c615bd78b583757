"""Clients that send slowly or go: they get an answer, and nothing of ours waits for ever."""

import asyncio

import pytest
from aiohttp import web

from gateway.server import body, protocol
from gateway.server.live_response import LiveResponse
from gateway.server.runner import HttpRunner, bound_socket

pytestmark = pytest.mark.real

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{"
)


async def test_a_body_that_does_not_come_is_answered(world, monkeypatch) -> None:
    monkeypatch.setattr(body, "GRACE_S", 0.3)
    async with world() as w, w.http() as http:
        url = http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        key = http.headers["authorization"].removeprefix("Bearer ")
        writer.write(HEAD.format(key=key).encode())
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_never_reads_is_cut(monkeypatch) -> None:
    monkeypatch.setattr(protocol, "STALLED_S", 0.2)

    async def large(_: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(32 << 20))

    runner = HttpRunner(large, protocol.ServerLimits(), lambda error, request_id: None)
    sock = bound_socket("127.0.0.1", 0)
    await runner.start(sock)
    try:
        reader, writer = await asyncio.open_connection(*sock.getsockname(), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n")
        assert runner.server.open_connections == 1
        async with asyncio.timeout(60):
            while runner.server.open_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(33 << 20)
        writer.close()
    finally:
        await runner.close()


async def test_a_client_that_goes_as_its_stream_begins_is_no_failure_of_ours(
    world, monkeypatch
) -> None:
    def gone(*_: object) -> None:  # as the transport says before the connection is known as lost
        raise ConnectionResetError("the client hung up")

    monkeypatch.setattr(LiveResponse, "begin", gone)
    async with world() as w:
        messages = [{"role": "user", "content": "hello"}]
        reader, writer = await w.raw({"model": "tiny", "messages": messages, "stream": True})
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        page = w.gateway.metrics.page().decode()
        assert 'status="499"' in page
        assert 'status="500"' not in page
