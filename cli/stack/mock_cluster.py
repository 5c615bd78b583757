"""librdkafka's mock cluster, a broker in threads of this process that only this process reaches.

The mock cluster listens on a random loopback port, which is open to all users of the machine, and
has no option to change that. So a Unix socket replaces the port under the mock's file descriptor,
and the socket's name is removed at once.
"""

import ctypes
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

# Milliseconds after which a killed consumer's partitions are reassigned (KIP-848 groups).
_SESSION_TIMEOUT_MS = 4000
_HEARTBEAT_MS = 500
_BACKLOG = 128
_V = ctypes.c_void_p
_TEXT = ctypes.c_char_p
_INT = ctypes.c_int
_I32 = ctypes.c_int32

# Name -> (argument types, result type). Upstream calls the mock API experimental, so every symbol
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
    """A mock broker, which runs in threads of librdkafka until `close`."""

    def __init__(self, host: str, port: int, topics: Mapping[str, int]) -> None:
        """Start the broker and create `topics` (name -> partitions).

        The broker advertises `host` and `port` to its clients.

        Raises:
            RuntimeError: The installed librdkafka has no usable mock cluster.
        """
        self._library = _load_library()
        error = ctypes.create_string_buffer(512)
        conf = self._library.rd_kafka_conf_new()
        # Level 3 logs only errors. The default would warn that `bootstrap.servers` is missing.
        self._library.rd_kafka_conf_set(conf, b"log_level", b"3", error, len(error))
        self._client = self._library.rd_kafka_new(0, conf, error, len(error))
        if not self._client:
            raise RuntimeError(f"librdkafka did not start: {error.value.decode()}")
        self._cluster = self._library.rd_kafka_mock_cluster_new(self._client, 1)
        if not self._cluster:
            raise RuntimeError("librdkafka did not start its mock cluster")
        address = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        own_port = int(address.rpartition(":")[2])
        self._socket = _hide_listener(own_port)
        self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        self._library.rd_kafka_mock_set_group_consumer_session_timeout_ms(
            self._cluster, _SESSION_TIMEOUT_MS
        )
        self._library.rd_kafka_mock_set_group_consumer_heartbeat_interval_ms(
            self._cluster, _HEARTBEAT_MS
        )
        self._library.rd_kafka_mock_broker_set_host_port(self._cluster, 1, host.encode(), port)
        for topic, partitions in topics.items():
            code = self._library.rd_kafka_mock_topic_create(
                self._cluster, topic.encode(), partitions, 1
            )
            if code != 0:
                raise RuntimeError(f"topic {topic} was not created: librdkafka error {code}")
        # Each call above waited for the mock's thread, so the thread now uses its new listener.
        _cut_strangers(own_port)

    @property
    def path(self) -> str:
        """The path of the mock's Unix socket, which is valid only inside this process."""
        return f"/proc/self/fd/{self._socket}"

    def close(self) -> None:
        """Stop the broker. Its events, which are only in memory, are lost."""
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)
        os.close(self._socket)


def _hide_listener(port: int) -> int:
    """Replace the TCP listener on `port` by a Unix socket. Returns a handle to the socket's path.

    Raises:
        RuntimeError: No socket of this process listens on the port.
    """
    for number, found in _tcp_sockets(port):
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
                path = f"{folder}/s"
                with socket.socket(socket.AF_UNIX) as hidden:
                    hidden.bind(path)
                    hidden.listen(_BACKLOG)
                    os.dup2(hidden.fileno(), number, inheritable=False)
                return os.open(path, os.O_PATH)
    raise RuntimeError("librdkafka's mock cluster listens on no port: install confluent-kafka 2.16")


def _cut_strangers(port: int) -> None:
    """Close connections that were opened before the port was hidden, by other processes."""
    for _, found in _tcp_sockets(port):
        with suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)


def _tcp_sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's TCP sockets on a port, each with its number and a temporary copy."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the entry was closed meanwhile, like that of this directory
            if not entry.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family == socket.AF_INET and found.getsockname()[1] == port:
                    yield int(entry.name), found


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
