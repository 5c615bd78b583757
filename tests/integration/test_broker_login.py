"""The local stack's broker with a password: its clients prove it, strangers get nothing."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from confluent_kafka import Consumer, KafkaException, Producer

from cli.stack.broker import broker_spec, client_settings
from sluice.kafka import KafkaSettings
from sluice.process import ChildProcess, free_port
from tests.integration.conftest import child_environment

pytestmark = pytest.mark.real
TOPIC = "sluice.requests.v1"
HOST = "127.0.0.1"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def closed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, int]]:
    """The address of a broker whose password is `right`, and its process."""
    port = free_port()
    log = tmp_path_factory.mktemp("broker") / "log"
    spec = broker_spec(port, log, child_environment(), password="right")
    process = await ChildProcess.start(spec)
    yield f"{HOST}:{port}", process.pid
    await process.stop()


def options(address: str, password: str) -> dict[str, Any]:
    values = {k.removeprefix("KAFKA__").lower(): v for k, v in client_settings(password).items()}
    return {
        "bootstrap.servers": address,
        "log_level": 0,
        **(KafkaSettings.model_validate(values).options() if password else {}),
    }


def test_a_client_with_the_password_writes_and_reads(closed: tuple[str, int]):
    address, _ = closed
    producer = Producer(options(address, "right"))
    producer.produce(TOPIC, b"event")
    assert producer.flush(60) == 0
    group = {"group.id": "g", "auto.offset.reset": "earliest"}
    consumer = Consumer({**options(address, "right"), **group})
    consumer.subscribe([TOPIC])
    message = consumer.poll(60)
    assert message is not None
    assert message.value() == b"event"
    consumer.close()


@pytest.mark.parametrize("password", ["wrong", ""], ids=["another password", "no login"])
def test_strangers_see_no_topic(closed: tuple[str, int], password: str):
    address, _ = closed
    with pytest.raises(KafkaException):
        Producer(options(address, password)).list_topics(timeout=2)


@pytest.mark.parametrize("frame", [b"\0\0\0\0", b"\x7f\xff\xff\xff", b"GET / HTTP/1.0\r\n\r\n"])
def test_a_failed_login_ends_the_connection(closed: tuple[str, int], frame: bytes):
    host, _, port = closed[0].rpartition(":")
    with socket.create_connection((host, int(port)), 20) as link:
        link.sendall(frame)
        assert link.recv(100) == b""


def test_nothing_else_of_it_listens(closed: tuple[str, int]):
    address, pid = closed
    process = psutil.Process(pid)
    listening = [it for it in process.net_connections() if it.status == "LISTEN"]
    assert [f"{it.laddr.ip}:{it.laddr.port}" for it in listening] == [address]
    paths = [str(it.laddr) for it in process.net_connections("unix")]
    assert paths, "its mock"
    assert not [path for path in paths if path and Path(path).exists()]
