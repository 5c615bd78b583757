"""The event producer on the real broker child: what is emitted arrives, whatever dies between."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException

from sluice.events import EVENT_MAX_BYTES, REQUESTS_TOPIC, EventProducer
from sluice.process import free_port
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

pytestmark = pytest.mark.real

WAIT_S = 60.0


def event(number: int, **fields: Any) -> bytes:
    told = RequestEvent(schema_version=1, event_id=f"{number:06}", **fields)
    return told.SerializeToString()


@contextmanager
def producing(address: str, spool: Path | None, **options: Any) -> Iterator[EventProducer]:
    options = {"broker_wait_s": 0.5, "linger_ms": 5, **options}
    producer = EventProducer(address, REQUESTS_TOPIC, spool_directory=spool, **options)
    try:
        yield producer
    finally:
        producer.close(0.1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the state of another thread
            await asyncio.sleep(0.02)


async def arrived(address: str, wanted: int) -> list[str]:
    """Read the topic from its beginning until `wanted` different events are there."""

    def read() -> list[str]:
        consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": f"test-{os.urandom(4).hex()}",
                "group.protocol": "consumer",
                "auto.offset.reset": "earliest",
                "log_level": 0,
            }
        )
        consumer.subscribe([REQUESTS_TOPIC])
        found: list[str] = []
        try:
            for _ in range(int(WAIT_S / 0.1)):
                for message in consumer.consume(10_000, 0.1):
                    assert message.error() is None
                    found.append(RequestEvent.FromString(message.value() or b"").event_id)
                if len(set(found)) >= wanted:
                    return found
        finally:
            consumer.close()
        raise AssertionError(f"{len(set(found))} of {wanted} events arrived")

    return await asyncio.to_thread(read)


async def test_a_resting_producer_sends_the_next_event(broker: Any, tmp_path: Path) -> None:
    with producing(broker.address, tmp_path) as producer:
        for number in range(3):
            await until(lambda: producer._is_resting)
            producer.emit(event(number))
            assert await asyncio.to_thread(producer.flush, WAIT_S)
        assert producer.stats.delivered == 3


async def test_clients_learn_only_the_fixed_port(broker: Any) -> None:
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "x"})
    found = await asyncio.to_thread(consumer.list_topics, timeout=60)
    consumer.close()
    assert [(one.host, one.port) for one in found.brokers.values()] == [("127.0.0.1", broker.port)]
    assert len(found.topics[REQUESTS_TOPIC].partitions) == 16


async def test_events_arrive_once(broker: Any, tmp_path: Path) -> None:
    with producing(broker.address, tmp_path, broker_wait_s=WAIT_S) as producer:
        for number in range(5000):
            producer.emit(event(number))
        assert await asyncio.to_thread(producer.flush, WAIT_S)
        found = await arrived(broker.address, 5000)
        assert sorted(found) == [f"{number:06}" for number in range(5000)]
        stats = producer.stats
    assert (stats.emitted, stats.delivered) == (5000, 5000)
    assert (stats.dropped, stats.spooled, stats.spool_bytes, stats.queued) == (0, 0, 0, 0)


async def test_events_spooled_while_the_broker_is_away_arrive(broker: Any, tmp_path: Path) -> None:
    with producing(broker.address, tmp_path) as producer:
        producer.emit(event(0))
        assert await asyncio.to_thread(producer.flush, WAIT_S)
        await broker.kill()
        for number in range(1, 1500):
            producer.emit(event(number))
        await until(lambda: producer.stats.spooled == 1499)
        for number in range(1500, 3000):
            producer.emit(event(number))
        await until(lambda: producer.stats.spooled == 2999)
        assert not producer.flush(0.0)
        await broker.start()  # empty: event 0 was delivered and is gone with it
        assert await asyncio.to_thread(producer.flush, WAIT_S)
        found = await arrived(broker.address, 2999)
        assert set(found) == {f"{number:06}" for number in range(1, 3000)}
        producer.emit(event(3000))
        assert await asyncio.to_thread(producer.flush, WAIT_S)
        stats = producer.stats
    assert (stats.dropped, stats.damaged, stats.spool_bytes) == (0, 0, 0)


async def test_events_go_straight_again_although_more_come_all_the_time(
    broker: Any, tmp_path: Path
) -> None:
    with producing(broker.address, tmp_path) as producer:
        number, step = 0, producer._step

        def busy_step(now: float) -> None:
            """One more before each step of the thread: there never is a pause."""
            nonlocal number
            producer.emit(event(number))
            number += 1
            step(now)

        await broker.kill()
        producer._step = busy_step
        await until(lambda: producer.stats.spooled > 5)
        await broker.start()
        await until(lambda: producer.stats.spool_bytes == 0)
        spooled, wanted = producer.stats.spooled, producer.stats.delivered + 20
        await until(lambda: producer.stats.delivered > wanted)
        assert producer.stats.spooled == spooled
        producer._step = step
        assert await asyncio.to_thread(producer.flush, WAIT_S)
        assert set(await arrived(broker.address, number)) == {f"{n:06}" for n in range(number)}


async def test_events_that_may_not_stay_in_memory_go_to_disk_unless_the_broker_takes_them(
    broker: Any, tmp_path: Path
) -> None:
    with producing(broker.address, tmp_path / "there", broker_wait_s=WAIT_S) as producer:
        producer.emit(event(0))
        producer.put_on_disk()
        assert await asyncio.to_thread(producer.flush, WAIT_S)
        assert producer.stats.spooled == 0
    away = f"127.0.0.1:{free_port()}"
    with producing(away, tmp_path / "away", broker_wait_s=WAIT_S) as producer:
        for number in range(3):
            producer.emit(event(number))
        await until(lambda: not producer._queue)  # the client has them, and waits for the broker
        producer.put_on_disk()
        await until(lambda: producer.stats.spooled == 3)
        assert producer.stats.dropped == 0


async def test_events_spooled_by_a_stopped_process_are_sent_by_the_next(
    broker: Any, tmp_path: Path
) -> None:
    with producing(f"127.0.0.1:{free_port()}", tmp_path) as producer:
        for number in range(700):
            producer.emit(event(number))
    with producing(broker.address, tmp_path) as producer:
        producer.emit(event(700))
        assert await asyncio.to_thread(producer.flush, WAIT_S)
        assert len(set(await arrived(broker.address, 701))) == 701


_EMITTER = """
import sys, time
from pathlib import Path
from sluice import shared_secret
from sluice.events import EventProducer
from sluice.logs import configure_logs
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

shared_secret.use()
configure_logs("emitter")  # to stderr
producer = EventProducer(sys.argv[1], "sluice.requests.v1", spool_directory=Path(sys.argv[2]),
                         spool_segment_bytes=4096, broker_wait_s=0.2)
number = 0
while True:
    event = RequestEvent(schema_version=1, event_id=f"{number:06}")
    producer.emit(event.SerializeToString())
    number += 1
    if number % 50 == 0:
        print(producer.stats.spooled, flush=True)
        time.sleep(0.005)
"""


async def test_a_process_killed_while_it_spools_loses_nothing_that_was_spooled(
    broker: Any, tmp_path: Path
) -> None:
    away = f"127.0.0.1:{free_port()}"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _EMITTER, away, str(tmp_path)), stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    spooled = 0
    async with asyncio.timeout(WAIT_S):
        while spooled < 2000:
            spooled = int(await child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    await child.communicate()
    with producing(broker.address, tmp_path) as producer:
        assert await asyncio.to_thread(producer.flush, WAIT_S)
        found = set(await arrived(broker.address, spooled))
        assert {f"{number:06}" for number in range(spooled)} <= found
        assert producer.stats.damaged <= 1


async def test_without_a_spool_losses_are_counted() -> None:
    with producing(f"127.0.0.1:{free_port()}", None) as producer:
        for number in range(300):
            producer.emit(event(number))
        await until(lambda: producer.stats.dropped == 300)
        assert producer.stats.delivered == 0


async def test_events_give_their_room_on_disk_to_better_ones(tmp_path: Path) -> None:
    room = [True]
    away = f"127.0.0.1:{free_port()}"
    with producing(away, tmp_path, may_spool=lambda: room[0], broker_wait_s=0.5) as producer:
        for number in range(20):
            producer.emit(event(number))
        await until(lambda: producer.stats.spooled == 20)
        assert producer.stats.spool_bytes > 0
        room[0] = False
        await until(lambda: producer.stats.dropped == 20)
        assert producer.stats.spool_bytes == 0
        producer.emit(event(21))
        await until(lambda: producer.stats.dropped == 21)
        room[0] = True
        producer.emit(event(22))
        await until(lambda: producer.stats.spooled == 21)
    assert not producer.is_spool_tight


async def test_excess_events_go_to_disk_or_are_counted(tmp_path: Path) -> None:
    away = f"127.0.0.1:{free_port()}"
    with producing(away, tmp_path, queue_max=10, broker_wait_s=60.0) as producer:
        producer.emit(event(0, outcome="x" * EVENT_MAX_BYTES))
        assert producer.stats.dropped == 1
        for number in range(50):  # more than the client's queue takes
            producer.emit(event(number))
            await until(lambda: not producer._queue)
        await until(lambda: producer.stats.spooled == 50)
        assert producer.stats.dropped == 1
        for number in range(5000):  # more than memory takes between two turns of the thread
            producer.emit(event(number))
        await until(lambda: not producer._queue)
        await until(lambda: producer.stats.spooled + producer.stats.dropped == 5051)


async def test_a_taken_port_is_said_plainly(broker: Any) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.stack.broker", "--port", str(broker.port)),
        stderr=subprocess.PIPE,
    )
    _, text = await child.communicate()
    assert child.returncode == 1
    assert b"cannot be used (Address already in use)" in text


async def test_the_broker_ends_when_asked(broker: Any) -> None:
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "x", "log_level": 0})
    await asyncio.to_thread(consumer.list_topics, timeout=60)
    assert await broker.stop() == 0  # although a client is connected
    with pytest.raises(KafkaException):
        await asyncio.to_thread(consumer.list_topics, timeout=0.2)
    consumer.close()
