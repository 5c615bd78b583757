"""The telemetry service with its real peers: an event becomes a row, whatever dies between."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from confluent_kafka import Producer

from cli.stack.broker import broker_spec
from control_plane.rollouts.feed import open_feed
from control_plane.telemetry_client import FeedDownError
from sluice.buckets import bucket_of
from sluice.event_proof import proof
from sluice.events import REQUESTS_TOPIC, TEXTS_TOPIC, EventProducer
from sluice.process import free_port
from sluice.wire.telemetry.v1.telemetry_pb2 import ARM_CANARY, ARM_CONTROL, RequestEvent
from tests.integration.conftest import RestartableServer, child_environment
from tests.integration.telemetry_process import ADMIN_KEY, WAIT_S, Telemetry, running, until

pytestmark = pytest.mark.real

RECEIVED_MS = 1_790_000_000_000
EARLIER_MS = RECEIVED_MS - 3_600_000


def event(number: int, **fields: Any) -> bytes:
    values = {
        "tenant_id": "ten_a",
        "schema_version": 1,
        "event_id": f"{number:06}",
        "received_at_unix_ms": RECEIVED_MS + number,
    }
    told = RequestEvent(request_id=f"req_{number}", **{**values, **fields})
    return told.SerializeToString()


def event_of(tenant: str, number: int, **fields: Any) -> bytes:
    """Return an event for a test that shares its service: of a tenant of the test's own."""
    own = {
        "tenant_id": tenant,
        "event_id": f"{tenant}-{number}",
        "received_at_unix_ms": EARLIER_MS + number,
    }
    return event(number, **own, **fields)


async def ids_of(telemetry: Telemetry, tenant: str) -> list[str]:
    return await telemetry.column(
        f"SELECT event_id FROM requests FINAL WHERE tenant_id = '{tenant}' ORDER BY event_id"
    )


async def flush(producer: EventProducer) -> None:
    assert await asyncio.to_thread(producer.flush, WAIT_S)


async def until_written(telemetry: Telemetry, count: float) -> None:
    async def written() -> bool:
        return await telemetry.metric("telemetry_events_written_total") >= count

    await until(written)


@dataclass(frozen=True)
class SharedService:
    """The service on a database of its own in the store of the whole run, and its events."""

    telemetry: Telemetry
    producer: EventProducer
    broker: RestartableServer


@asynccontextmanager
async def producing(address: str, home: Path) -> AsyncIterator[EventProducer]:
    producer = EventProducer(
        address, REQUESTS_TOPIC, spool_directory=home / "spool", broker_wait_s=2.0
    )
    try:
        yield producer
    finally:
        producer.close(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    tmp_path_factory: pytest.TempPathFactory, shared_tracestore: Any
) -> AsyncIterator[SharedService]:
    """One for all tests that end nothing; each has tenants of its own."""
    home = tmp_path_factory.mktemp("shared")
    port = free_port()
    broker = RestartableServer(broker_spec(port, home / "broker.log", child_environment()), port)
    await broker.start()
    try:
        async with (
            producing(broker.address, home) as producer,
            running(home, broker, shared_tracestore) as service,
        ):
            await until(service.is_ready)
            yield SharedService(service, producer, broker)
    finally:
        await broker.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(shared: SharedService) -> Telemetry:
    """The service with three requests, the newest ones."""
    answered = {"model": "m-1", "outcome": "stop", "status": 200}
    emit = shared.producer.emit
    before = await shared.telemetry.metric("telemetry_events_written_total")
    emit(event(1, prompt_tokens=12, session_hash=2**64 - 1, **answered))
    emit(event(2, tenant_id="ten_b", key_id="key_b", status=429, is_stream=True))
    emit(event(3, status=200))
    await flush(shared.producer)
    await until_written(shared.telemetry, before + 3)
    return shared.telemetry


@pytest.mark.asyncio(loop_scope="module")
async def test_an_event_becomes_a_row_and_an_answer(asked: Telemetry) -> None:
    newest = (await asked.http.get("/v1/requests", params={"limit": 1})).json()["data"]
    assert [row["request_id"] for row in newest] == ["req_3"]
    rows = (await asked.http.get("/v1/requests", params={"model": "m-1"})).json()["data"]
    assert len(rows) == 1
    assert rows[0]["received_at"] == "2026-09-21T14:13:20.001+00:00"
    assert rows[0]["session_hash"] == "f" * 16
    assert (rows[0]["prompt_tokens"], rows[0]["outcome"], rows[0]["status"]) == (12, "stop", 200)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"key": "key_b"}, ["req_2"]),
        ({"model": "m-1"}, ["req_1"]),
        ({"status": "429"}, ["req_2"]),
        ({"status": "4xx"}, ["req_2"]),
        ({"tenant": "ten_a", "status": "5xx"}, []),
        ({"since": "2026-09-21T14:13:20.002Z"}, ["req_3", "req_2"]),
        ({"tenant": "ten_a", "status": "200"}, ["req_3", "req_1"]),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_requests_are_found_by_their_properties(
    asked: Telemetry, query: dict[str, str], found: list[str]
) -> None:
    rows = (await asked.http.get("/v1/requests", params=query)).json()["data"]
    assert [row["request_id"] for row in rows] == found


@pytest.mark.parametrize("wrong", [{"status": "6xx"}, {"status": "20"}, {"since": "yesterday"}])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_question_that_makes_no_sense_is_refused(
    asked: Telemetry, wrong: dict[str, str]
) -> None:
    assert (await asked.http.get("/v1/requests", params=wrong)).status_code == 400


@pytest.mark.asyncio(loop_scope="module")
async def test_only_the_admin_key_opens_and_mistakes_are_named(asked: Telemetry) -> None:
    for header in ("", "Bearer wrong", f"Basic {ADMIN_KEY}", "Bearer é"):
        answer = await asked.http.get("/v1/requests", headers={"Authorization": header.encode()})
        assert answer.status_code == 401
        assert answer.json()["code"] == "invalid_api_key"
    for limit in ("0", "-1", "1001", "x", "9" * 30):
        answer = await asked.http.get("/v1/requests", params={"limit": limit})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    hostile = {"tenant": "x' OR 1=1 --"}
    assert (await asked.http.get("/v1/requests", params=hostile)).json() == {"data": []}


@pytest.mark.asyncio(loop_scope="module")
async def test_duplicates_are_one_row(shared: SharedService) -> None:
    for _ in range(3):  # in batches of their own
        before = await shared.telemetry.metric("telemetry_events_written_total")
        shared.producer.emit(event_of("twice", 1))
        shared.producer.emit(event_of("twice", 2))
        await flush(shared.producer)
        await until_written(shared.telemetry, before + 2)
    assert await ids_of(shared.telemetry, "twice") == ["twice-1", "twice-2"]
    of = {"tenant": "twice"}
    rows = (await shared.telemetry.http.get("/v1/requests", params=of)).json()["data"]
    assert [row["event_id"] for row in rows] == ["twice-2", "twice-1"]


@pytest.mark.asyncio(loop_scope="module")
async def test_poison_is_parked_forged_events_are_dropped_and_nothing_stops(
    shared: SharedService,
) -> None:
    telemetry = shared.telemetry
    before = await telemetry.metric("telemetry_events_written_total")
    raw = Producer({"bootstrap.servers": shared.broker.address})
    for payload in (b"\xff\xffno event", event(9, schema_version=99), b""):
        raw.produce(REQUESTS_TOPIC, payload, headers=proof(REQUESTS_TOPIC, payload))
    raw.produce(REQUESTS_TOPIC, event(10))  # of a stranger
    raw.produce(REQUESTS_TOPIC, event(11), headers=proof(TEXTS_TOPIC, event(11)))
    assert await asyncio.to_thread(raw.flush, WAIT_S) == 0
    shared.producer.emit(event_of("good", 1))
    await flush(shared.producer)

    async def both() -> bool:
        reasons = ("undecodable", "unknown_schema")
        name = "telemetry_messages_poisoned_total"
        parked = [await telemetry.metric(f'{name}{{reason="{reason}"}}') for reason in reasons]
        written = await telemetry.metric("telemetry_events_written_total")
        forged = await telemetry.metric("telemetry_messages_forged_total")
        return parked == [1, 2] and written >= before + 1 and forged == 2

    await until(both)
    assert await ids_of(telemetry, "good") == ["good-1"]
    assert not set(await telemetry.ids()) & {"000009", "000010", "000011"}
    parked = await telemetry.column("SELECT reason FROM poison FINAL ORDER BY reason, detail")
    assert parked == ["undecodable", "unknown_schema", "unknown_schema"]
    payload = await telemetry.column(
        "SELECT hex(payload) FROM poison WHERE payload LIKE '%no event'"
    )
    assert payload == [b"\xff\xffno event".hex().upper()]


@pytest.mark.asyncio(loop_scope="module")
async def test_rollouts_get_windows_of_ingested_events(shared: SharedService) -> None:
    telemetry, begin_ms = shared.telemetry, EARLIER_MS // 10_000 * 10_000
    arms = {ARM_CONTROL: 30, ARM_CANARY: 7}
    fields = {"rollout_id": "r1", "outcome": "stop", "ttft_us": 100_000, "total_us": 100_000}
    number = 0
    for arm, requests in arms.items():
        for _ in range(requests):
            shared.producer.emit(event_of("arms", number, arm=arm, **fields))
            number += 1
    await flush(shared.producer)
    assert (await telemetry.http.get("/v1/rollouts/r1/windows")).status_code == 400
    async with open_feed(str(telemetry.http.base_url), ADMIN_KEY) as feed:
        windows = ()
        async with asyncio.timeout(WAIT_S):
            while not windows:
                with suppress(FeedDownError):  # a machine that is busy takes longer than 5 s
                    windows = await feed.windows("r1", begin_ms, begin_ms + 20_000)
                await asyncio.sleep(0.2)
        assert [(it.control.requests, it.canary.requests) for it in windows] == [(30, 7), (0, 0)]
        assert windows[0].canary.ttft_ms.counts[bucket_of(100)] == 7
    now_ms = int(time.time() * 1000)
    query = {"after_ms": now_ms, "until_ms": now_ms + 60_000}
    answer = await telemetry.http.get("/v1/rollouts/r1/windows", params=query)
    assert answer.json()["data"] == []
    wrong = {"Authorization": "Bearer wrong"}
    answer = await telemetry.http.get("/v1/rollouts/r1/windows", params=query, headers=wrong)
    assert answer.status_code == 401


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_left_open_by_a_killed_gateway_becomes_a_row(shared: SharedService) -> None:
    lost = {"schema_version": 2, "outcome": "gateway_lost", "status": 500, "output_tokens": 3}
    emit = shared.producer.emit
    emit(event_of("cut", 1, outcome="stop", status=200))
    emit(event_of("cut", 1, **lost))
    emit(event_of("cut", 2, **lost))
    emit(event_of("cut", 2, part=1, **lost))
    query = (
        "SELECT concat(event_id, ' ', outcome, ' ', toString(output_tokens)) FROM requests FINAL"
        " WHERE tenant_id = 'cut' ORDER BY event_id"
    )

    async def are(*rows: str) -> bool:
        return await shared.telemetry.column(query) == list(rows)

    # They may come in several batches, with a closing made into a row between two.
    await until(partial(are, "cut-1 stop 0", "cut-2 gateway_lost 6"))
    emit(event_of("cut", 2, outcome="stop", status=200, output_tokens=9))  # it had been spooled
    await until(partial(are, "cut-1 stop 0", "cut-2 stop 9"))


async def test_no_event_is_lost_or_doubled_through_stops_and_kills(
    tmp_path: Path, broker: Any, tracestore: Any
) -> None:
    await broker.stop()
    await tracestore.stop()
    service = Telemetry(tmp_path, broker, tracestore)
    try:
        async with producing(broker.address, tmp_path) as producer:
            await start_before_its_peers(service, producer, broker, tracestore)
            await stop_while_nothing_can_be_written(service, producer, tracestore)
            await kill_in_turns(service, producer, tracestore)
            assert await service.stop() == 0
    finally:
        await service.stop()
        await service.http.aclose()


async def start_before_its_peers(
    service: Telemetry, producer: EventProducer, broker: Any, tracestore: Any
) -> None:
    await service.start()
    producer.emit(event(0))

    async def tried() -> bool:
        return await service.metric("telemetry_session_failures_total") >= 1

    await until(tried)
    assert not await service.is_ready()
    await tracestore.start()
    await broker.start()
    await until(service.is_ready)
    await flush(producer)
    await until_written(service, 1)


async def stop_while_nothing_can_be_written(
    service: Telemetry, producer: EventProducer, tracestore: Any
) -> None:
    """Fails when offsets are stored before the insert: stopping commits what is stored."""
    await tracestore.kill()
    emitted_at = time.time()
    for number in range(1, 500):
        producer.emit(event(number))
    await flush(producer)
    before = await service.metric("telemetry_write_failures_total")

    async def failed() -> bool:
        return await service.metric("telemetry_write_failures_total") >= before + 2

    await until(failed)
    assert not await service.is_ready()
    assert await service.metric("telemetry_ingested_until_seconds") < emitted_at
    answer = await service.http.get("/v1/requests")
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert answer.headers["Retry-After"] == "2"

    assert await service.stop() == 0
    await tracestore.start()
    await service.start()
    await until_written(service, 499)
    assert await service.ids() == [f"{number:06}" for number in range(500)]

    async def ingested() -> bool:
        return await service.metric("telemetry_ingested_until_seconds") > emitted_at

    await until(ingested)


async def kill_in_turns(service: Telemetry, producer: EventProducer, tracestore: Any) -> None:
    """Kill the store, then the service, while events come."""
    sent = 500

    async def emit_some() -> None:
        nonlocal sent
        for number in range(sent, sent + 300):
            producer.emit(event(number))
        sent += 300
        await flush(producer)

    for kill, start in (
        (tracestore.kill, tracestore.start),
        (partial(service.stop, kill=True), service.start),
    ):
        await emit_some()
        await kill()
        await emit_some()
        await start()

    async def everything() -> bool:
        return len(await service.ids()) >= sent

    await until(everything)
    assert await service.ids() == [f"{number:06}" for number in range(sent)]


async def test_a_stop_writes_the_rest_and_losses_of_a_broker_are_counted(
    tmp_path: Path, broker: Any, shared_tracestore: Any
) -> None:
    async with (
        producing(broker.address, tmp_path) as producer,
        running(tmp_path, broker, shared_tracestore) as telemetry,
    ):
        await until(telemetry.is_ready)
        for number in range(3000):
            producer.emit(event(number))
        await flush(producer)
        assert await telemetry.stop() == 0
        assert len(await telemetry.ids()) == 3000
        await count_what_was_dropped(telemetry, broker)
        await read_an_empty_broker_from_its_beginning(telemetry, producer, broker)


async def count_what_was_dropped(telemetry: Telemetry, broker: Any) -> None:
    def send(*payloads: bytes) -> None:
        raw = Producer({"bootstrap.servers": broker.address, "linger.ms": 0})
        for payload in payloads:
            made = proof(REQUESTS_TOPIC, payload)
            raw.produce(REQUESTS_TOPIC, payload, partition=0, headers=made)
            assert raw.flush(WAIT_S) == 0

    # A partition of this broker keeps about 5 MB.
    await asyncio.to_thread(send, *(b"\xff" + os.urandom(800_000) for _ in range(10)))
    await telemetry.start()

    async def accounted() -> bool:
        parked = 'telemetry_messages_poisoned_total{reason="undecodable"}'
        counts = [
            await telemetry.metric(name) for name in ("telemetry_messages_missing_total", parked)
        ]
        return sum(counts) == 10 and counts[0] > 0

    await until(accounted)


async def read_an_empty_broker_from_its_beginning(
    telemetry: Telemetry, producer: EventProducer, broker: Any
) -> None:
    await broker.kill()
    for number in range(3000, 4500):
        producer.emit(event(number))
    await asyncio.to_thread(producer.flush, 1.0)
    await broker.start()
    await flush(producer)

    async def everything() -> bool:
        return len(await telemetry.ids()) >= 4500

    await until(everything)
    assert await telemetry.ids() == [f"{number:06}" for number in range(4500)]
    assert producer.stats.dropped == 0


async def test_a_separate_migration_is_repeatable_and_names_its_fault(
    shared_tracestore: Any,
) -> None:
    async def migrate(address: str) -> tuple[int | None, bytes]:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "telemetry.migrate"),
            env={
                "PATH": os.environ["PATH"],
                "TELEMETRY__CLICKHOUSE_URL": f"http://{address}",
                "TELEMETRY__CLICKHOUSE_DATABASE": "migrated",
            },
            stderr=asyncio.subprocess.PIPE,
        )
        _, text = await child.communicate()
        return child.returncode, text

    for round_number in range(2):
        status, text = await migrate(shared_tracestore.address)
        assert status == 0
        assert (b"migration_applied" in text) == (round_number == 0)
    status, text = await migrate(f"127.0.0.1:{free_port()}")
    assert status == 1
    assert b"was not migrated" in text
