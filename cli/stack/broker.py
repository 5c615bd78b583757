"""A Kafka-protocol broker for one machine, made of librdkafka's mock cluster and a fixed port.

The broker speaks the protocol over TCP to any client, with idempotent producers, consumer groups
and commits. It stores everything in memory, so **it is empty after a restart**. The port stays, and
clients reconnect. It stores about 5 MB per partition, and drops the oldest events first. It has no
admin API and no isolation of transactions. Production runs Kafka, which needs only another
address in the settings.

Only this process can reach the mock cluster. A relay on the fixed port forwards to it, after a
login by SASL if `BROKER_PASSWORD` is set. The mock cluster advertises the relay's port.

Run: `python -m cli.stack.broker --port 9092 --topic sluice.requests.v1:16`.
"""

import argparse
import asyncio
import os
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import uvloop

from cli.stack.broker_login import FRAME_MAX_BYTES, Login, LoginError, apis_of, versions_request
from cli.stack.mock_cluster import MockCluster
from cli.stack.scram import MECHANISM, Credential
from sluice.events import REQUESTS_TOPIC, TEXTS_TOPIC
from sluice.lifecycle import stop_signals
from sluice.process import ProcessSpec, port_answers

_HOST = "127.0.0.1"
# The mock stores about 5 MB per partition, so 16 partitions have room for some 150,000 events.
_PARTITIONS = 16
_RELAY_CHUNK_BYTES = 256 << 10
_CONNECT_S = 5.0
_LOGIN_S = 10.0
_PASSWORD = "BROKER_PASSWORD"  # noqa: S105 - the name of a variable
_USER = "sluice"


class Relay:
    """Admits clients, and forwards their requests to the mock cluster."""

    def __init__(self, path: str, credential: Credential | None, apis: bytes) -> None:
        """Create a relay to a mock cluster.

        Args:
            path: Path of the Unix socket of the mock cluster.
            credential: Login that clients need. None if they need no login.
            apis: API versions of the mock cluster, as `apis_of` returns them.
        """
        self._path = path
        self._credential = credential
        self._apis = apis

    async def serve(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it."""
        try:
            async with asyncio.timeout(_LOGIN_S):
                if self._credential is not None:
                    await _log_in(client, writer, Login(self._credential, self._apis))
                broker, broker_writer = await asyncio.open_unix_connection(self._path)
        except (OSError, EOFError, TimeoutError, LoginError):
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(client, broker_writer))
                group.create_task(_pump(broker, writer))
        finally:
            writer.close()
            broker_writer.close()


async def _log_in(client: asyncio.StreamReader, writer: asyncio.StreamWriter, login: Login) -> None:
    """Answer the client until it is logged in. Raises LoginError, OSError and EOFError."""
    try:
        while not login.is_done:
            await _send(writer, login.answer(await _frame(client, FRAME_MAX_BYTES)))
    except LoginError as error:
        if error.reply:
            await _send(writer, error.reply)
        raise


async def _frame(source: asyncio.StreamReader, max_bytes: int) -> bytes:
    (length,) = struct.unpack(">i", await source.readexactly(4))
    if not 0 <= length <= max_bytes:
        raise LoginError(f"a frame of {length} bytes before the login")
    return await source.readexactly(length)


async def _send(sink: asyncio.StreamWriter, frame: bytes) -> None:
    sink.write(struct.pack(">i", len(frame)) + frame)
    await sink.drain()


async def _apis(path: str) -> bytes:
    """Return the API versions of the mock cluster. Raises RuntimeError without an answer."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            source, sink = await asyncio.open_unix_connection(path)
            try:
                await _send(sink, versions_request())
                return apis_of(await _frame(source, _RELAY_CHUNK_BYTES))
            finally:
                sink.close()
    except (OSError, EOFError, TimeoutError, ValueError, struct.error, LoginError) as error:
        raise RuntimeError(
            f"librdkafka's mock cluster does not answer on a Unix socket ({error!r}): "
            "install confluent-kafka 2.16"
        ) from error


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy bytes until `source` ends or either side breaks, then close `sink`."""
    with suppress(OSError):
        while (data := await source.read(_RELAY_CHUNK_BYTES)) and not sink.is_closing():
            sink.write(data)  # uvloop raises RuntimeError after the end
            await sink.drain()
    sink.close()


def _topic(text: str) -> tuple[str, int]:
    name, _, partitions = text.partition(":")
    return name, int(partitions or _PARTITIONS)


async def _run(host: str, port: int, topics: Mapping[str, int], password: str) -> None:
    # The port is bound first, so that an occupied port is reported before anything else starts.
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    cluster = MockCluster(host, port, topics)
    credential = Credential.of(_USER, password) if password else None
    relay = Relay(cluster.path, credential, await _apis(cluster.path))
    async with stop_signals() as stop, asyncio.TaskGroup() as group:
        connections: set[asyncio.Task[None]] = set()

        def accept(client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = group.create_task(relay.serve(client, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(accept, sock=listener, limit=_RELAY_CHUNK_BYTES)
        await stop.wait()
        server.close()
        for task in connections:
            task.cancel()
    cluster.close()


def main() -> None:
    """Run the broker until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default=_HOST, help="where it listens, and what clients are told")
    parser.add_argument("--topic", type=_topic, action="append", metavar="NAME[:PARTITIONS]")
    arguments = parser.parse_args()
    topics: dict[str, int] = dict(
        arguments.topic or [(REQUESTS_TOPIC, _PARTITIONS), (TEXTS_TOPIC, _PARTITIONS)]
    )
    try:
        password = os.environ.pop(_PASSWORD, "")
        uvloop.run(_run(arguments.host, arguments.port, topics, password))
    except OSError as error:
        sys.exit(
            f"port {arguments.port} cannot be used ({error.strerror}): stop the process that"
            " listens there"
        )
    except RuntimeError as error:
        sys.exit(str(error))


def broker_spec(
    port: int, log_file: Path, env: Mapping[str, str], *, password: str = ""
) -> ProcessSpec:
    """Return the spec of the broker, which is ready as soon as its loopback port answers.

    Args:
        port: Port on loopback.
        log_file: File for the output of the process.
        env: The whole environment of the process.
        password: Password of clients, as in `client_settings`. Empty if they need none.
    """
    return ProcessSpec(
        name="broker",
        command=[sys.executable, "-m", "cli.stack.broker", "--port", str(port)],
        env={**env, _PASSWORD: password} if password else env,
        log_file=log_file,
        ready=lambda: port_answers(_HOST, port),
        stop_grace_s=3.0,
    )


def client_settings(password: str) -> dict[str, str]:
    """Return the environment variables for processes that are clients of the broker."""
    return {
        "KAFKA__SECURITY_PROTOCOL": "sasl_plaintext",
        "KAFKA__SASL_MECHANISM": MECHANISM,
        "KAFKA__SASL_USERNAME": _USER,
        "KAFKA__SASL_PASSWORD": password,
    }


if __name__ == "__main__":
    main()
