"""Clients that send slowly: they get an answer, and nothing of ours waits for ever."""

import asyncio

import pytest

from gateway.server import body

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
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()
