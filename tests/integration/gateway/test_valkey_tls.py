"""`rediss://`: the connection to Valkey by TLS, with a server whose certificate must be good."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from cli.certificates import BUNDLE, create
from gateway.limits.valkey import ValkeyClient


class Heard:
    """Waits for the greeting's end."""

    def __init__(self) -> None:
        self.up = asyncio.Event()

    def connected(self) -> None:
        self.up.set()

    def replied(self, reply: object) -> None: ...

    def refused(self, error: ResponseError) -> None: ...

    def disconnected(self) -> None: ...


@pytest.fixture
def folder(tmp_path) -> Path:
    create(tmp_path, days=2, hosts=["127.0.0.1"])
    return tmp_path


@pytest_asyncio.fixture
async def server(folder) -> AsyncIterator[int]:
    """Answers every command with +PONG; the port."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "monitoring.pem", folder / "monitoring-key.pem")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(b"+PONG\r\n")
        writer.close()

    serving = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    async with serving:
        yield serving.sockets[0].getsockname()[1]


async def test_a_good_certificate_is_taken(server, folder, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / BUNDLE))
    client, heard = ValkeyClient(f"rediss://127.0.0.1:{server}"), Heard()
    client.listen(heard)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.run())
        async with asyncio.timeout(20):
            await heard.up.wait()
        running.cancel()


async def test_one_of_an_unknown_ca_is_not(server, folder, monkeypatch):
    create(folder / "other", days=2)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "other" / BUNDLE))
    client = ValkeyClient(f"rediss://127.0.0.1:{server}")
    with pytest.raises(RedisConnectionError, match="certificate verify failed"):
        await client._connect()
