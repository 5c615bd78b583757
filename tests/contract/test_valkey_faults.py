"""What a gateway does with a Valkey that is late or refuses, over a real connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import hiredis
import pytest
from structlog.testing import capture_logs

from gateway.limits import shared
from gateway.limits.shared import SharedBuckets
from gateway.limits.valkey import ValkeyClient
from tests.waiting import until

DEADLINE_S = 0.2
PATIENT_S = 5.0
GRANTED = b"$0\r\n\r\n"  # all of no calls


class Server:
    """Answers scripts as it is told.

    Attributes:
        answer: To each script.
        delay_s: Before each answer.
        connections: How many there were.
        asked: How many scripts came.
    """

    def __init__(self) -> None:
        self.answer, self.delay_s = GRANTED, 0.0
        self.connections = self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        commands = hiredis.Reader(notEnoughData=None)
        while content := await reader.read(65536):
            commands.feed(content)
            while (command := commands.gets()) is not None:
                if command == [b"PING"]:
                    writer.write(b"+PONG\r\n")
                    continue
                self.asked += 1
                await asyncio.sleep(self.delay_s)
                writer.write(self.answer)
        writer.close()


@asynccontextmanager
async def connected(server: Server, deadline_s: float = DEADLINE_S) -> AsyncIterator[SharedBuckets]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = ValkeyClient(f"redis://127.0.0.1:{port}", deadline_s=deadline_s)
    buckets = SharedBuckets(client)
    async with listening, asyncio.TaskGroup() as tasks:
        run = tasks.create_task(client.run())
        try:
            yield buckets
        finally:
            run.cancel()


@pytest.mark.parametrize(
    ("answer", "delay_s"),
    [
        (GRANTED, 2 * DEADLINE_S),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", 0.0),
        (b"-MISCONF snapshots fail\r\n", 0.0),
    ],
    ids=["slow", "full", "disk"],
)
async def test_one_in_trouble_is_asked_again_where_it_is_connected(
    answer: bytes, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections by all gateways are what it needs least."""
    monkeypatch.setattr(shared, "_DEAD_AFTER_S", 60.0)  # this machine may be slow, too
    server = Server()
    server.answer, server.delay_s = answer, delay_s
    async with connected(server) as buckets:
        await until(lambda: server.asked >= 4)
        assert not buckets.is_up
        server.answer, server.delay_s = GRANTED, 0.0
        await until(lambda: buckets.is_up)
        assert server.connections == 1


@pytest.mark.parametrize("kind", ["READONLY", "MASTERDOWN", "NOREPLICAS"])
async def test_one_that_is_the_primary_no_more_is_left(kind: str) -> None:
    server = Server()
    server.answer = b"-%b no longer\r\n" % kind.encode()
    with capture_logs() as logs:
        async with connected(server, PATIENT_S) as buckets:
            await until(lambda: server.asked >= 3)
            server.answer = GRANTED
            await until(lambda: buckets.is_up)
            assert server.connections == server.asked
    dropped = [it for it in logs if it["event"] == "valkey_dropped"]
    assert {it["log_level"] for it in dropped} == {"info"}
    assert all("no longer" in it["reason"] for it in dropped)
    assert len(dropped) == server.connections - 1
    assert not [it for it in logs if it["event"] == "valkey_lost"], "it was left"
