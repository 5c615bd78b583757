"""A Kafka-protocol broker for one machine: librdkafka's mock cluster behind a fixed port.

It speaks the protocol over TCP to any client: idempotent producers, consumer groups, commits. It
keeps everything in memory, so **after a restart it is empty** (the port stays, clients reconnect),
holds about 5 MB per partition (the oldest go first), and has no admin API and no isolation of
transactions. Production runs Kafka; only the address in the settings differs.

The mock listens on a random loopback port. A relay on the fixed port forwards to it, and the mock
advertises the fixed port, so that clients never learn the other one.

Run: `python -m cli.stack.broker --port 9092 --topic sluice.requests.v1:16`.
"""

import argparse
import asyncio
import ctypes
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import uvloop

from sluice.events import REQUESTS_TOPIC, TEXTS_TOPIC
from sluice.lifecycle import stop_signals
from sluice.process import ProcessSpec, port_answers

_HOST = "127.0.0.1"
# The mock keeps about 5 MB per partition: many of them hold a backlog of some 150,000 events.
_PARTITIONS = 16
_RELAY_CHUNK_BYTES = 256 << 10
_CONNECT_S = 5.0
# A killed consumer's partitions go to its successor after this long (KIP-848 groups).
_SESSION_TIMEOUT_MS = 4000
_HEARTBEAT_MS = 500
_V = ctypes.c_void_p
_TEXT = ctypes.c_char_p
_INT = ctypes.c_int
_I32 = ctypes.c_int32

# Name -> (argument types, result type); upstream calls the mock API experimental, so every symbol
# is looked up at the start.
_SYMBOLS: dict[str, tuple[list[type], type | None]] = {
    "rd_kafka_conf_new": ([], _V),
    "rd_kafka_conf_set": ([_V, _TEXT, _TEXT, _TEXT, ctypes.c_size_t], _INT),
    "rd_kafka_new": ([_INT, _V, _TEXT, ctypes.c_size_t], _V),
    "rd_kafka_destroy": ([_V], None),
    "rd_kafka_mock_cluster_new": ([_V, _INT], _V),
    "rd_kafka_mock_cluster_bootstraps": ([_V], _TEXT),
    "rd_kafka_mock_cluster_destroy": ([_V], None),
    "rd_kafka_mock_topic_create": ([_V, _TEXT, _INT, _INT], _INT),
    "rd_kafka_mock_group_initial_rebalance_delay_ms": ([_V, _I32], None),
    "rd_kafka_mock_set_group_consumer_session_timeout_ms": ([_V, _INT], None),
    "rd_kafka_mock_set_group_consumer_heartbeat_interval_ms": ([_V, _INT], None),
    "rd_kafka_mock_broker_set_host_port": ([_V, _I32, _TEXT, _INT], None),
}


class MockCluster:
    """One mock broker; lives in threads of librdkafka until `close`."""

    def __init__(
        self, advertised_port: int, topics: Mapping[str, int], advertised_host: str = _HOST
    ) -> None:
        """Start the broker and create `topics` (name -> partitions).

        Raises:
            RuntimeError: The installed librdkafka has no usable mock cluster.
        """
        self._library = _load_library()
        error = ctypes.create_string_buffer(512)
        conf = self._library.rd_kafka_conf_new()
        # 3: errors only; without it librdkafka warns that `bootstrap.servers` is missing.
        self._library.rd_kafka_conf_set(conf, b"log_level", b"3", error, len(error))
        self._client = self._library.rd_kafka_new(0, conf, error, len(error))
        if not self._client:
            raise RuntimeError(f"librdkafka did not start: {error.value.decode()}")
        self._cluster = self._library.rd_kafka_mock_cluster_new(self._client, 1)
        if not self._cluster:
            raise RuntimeError("librdkafka did not start its mock cluster")
        address = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self.port = int(address.rpartition(":")[2])
        self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        self._library.rd_kafka_mock_set_group_consumer_session_timeout_ms(
            self._cluster, _SESSION_TIMEOUT_MS
        )
        self._library.rd_kafka_mock_set_group_consumer_heartbeat_interval_ms(
            self._cluster, _HEARTBEAT_MS
        )
        self._library.rd_kafka_mock_broker_set_host_port(
            self._cluster, 1, advertised_host.encode(), advertised_port
        )
        for topic, partitions in topics.items():
            code = self._library.rd_kafka_mock_topic_create(
                self._cluster, topic.encode(), partitions, 1
            )
            if code != 0:
                raise RuntimeError(f"topic {topic} was not created: librdkafka error {code}")

    def close(self) -> None:
        """Stop the broker; everything in it is gone."""
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)


async def _relay(
    client: asyncio.StreamReader, writer: asyncio.StreamWriter, target_port: int
) -> None:
    """Forward one connection to `target_port` until either side closes it."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            broker, broker_writer = await asyncio.open_connection(_HOST, target_port)
    except (OSError, TimeoutError):
        writer.close()
        return
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(client, broker_writer))
            group.create_task(_pump(broker, writer))
    finally:
        writer.close()
        broker_writer.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy until `source` ends or either side breaks, then close `sink`."""
    with suppress(OSError):
        while (data := await source.read(_RELAY_CHUNK_BYTES)) and not sink.is_closing():
            sink.write(data)  # of uvloop, not an OSError after the end
            await sink.drain()
    sink.close()


def _load_library() -> ctypes.CDLL:
    import confluent_kafka

    folder = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs")
    found = sorted(folder.glob("librdkafka-*.so.*"))
    if not found:
        raise RuntimeError(
            f"no librdkafka in {folder}: install the confluent-kafka wheel (not a source build)"
        )
    library = ctypes.CDLL(str(found[0]))
    for name, (arguments, result) in _SYMBOLS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise RuntimeError(
                f"{found[0].name} lacks {name}: install confluent-kafka 2.16"
            ) from None
        function.argtypes = arguments
        function.restype = result
    return library


def _topic(text: str) -> tuple[str, int]:
    name, _, partitions = text.partition(":")
    return name, int(partitions or _PARTITIONS)


async def _run(host: str, port: int, topics: Mapping[str, int]) -> None:
    # The port first: a taken one is found before anything else starts.
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    cluster = MockCluster(port, topics, host)
    async with stop_signals() as stop, asyncio.TaskGroup() as group:
        connections: set[asyncio.Task[None]] = set()

        def accept(client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = group.create_task(_relay(client, writer, cluster.port))
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
        uvloop.run(_run(arguments.host, arguments.port, topics))
    except OSError as error:
        sys.exit(
            f"port {arguments.port} cannot be used ({error.strerror}): stop what listens there"
        )
    except RuntimeError as error:
        sys.exit(str(error))


def broker_spec(port: int, log_file: Path, env: Mapping[str, str]) -> ProcessSpec:
    """Return how to run the broker on a loopback port; ready as soon as the port answers."""
    return ProcessSpec(
        name="broker",
        command=[sys.executable, "-m", "cli.stack.broker", "--port", str(port)],
        env=env,
        log_file=log_file,
        ready=lambda: port_answers(_HOST, port),
        stop_grace_s=3.0,
    )


if __name__ == "__main__":
    main()
