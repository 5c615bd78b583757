"""Redacted texts of requests: written, found by their tenant alone, and erased."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from clickhouse_connect.driver.exceptions import DatabaseError
from confluent_kafka import Producer

from sluice.event_proof import proof
from sluice.events import TEXTS_TOPIC
from sluice.wire.telemetry.v1.text_pb2 import TextEvent
from telemetry.texts import SKEW_S
from tests.integration.telemetry_process import WAIT_S, Telemetry, running, until

pytestmark = pytest.mark.real


@pytest_asyncio.fixture
async def telemetry(
    tmp_path: Path, broker: Any, shared_tracestore: Any
) -> AsyncIterator[Telemetry]:
    """The service on a database of its own in the store of the whole run."""
    async with running(tmp_path, broker, shared_tracestore) as service:
        yield service


def text(number: int, tenant: str = "acme", **fields: Any) -> TextEvent:
    now_ms = round(time.time() * 1000)
    usual: dict[str, Any] = {
        "schema_version": 1,
        "event_id": f"evt_text{number}",
        "received_at_unix_ms": now_ms,
        "request_id": f"r{number}",
        "prompt": '{"messages":["[email]"]}',
        "answers": '{"answers":["hi"]}',
        "redactions": {"email": 1},
        "expires_at_unix_ms": now_ms + 86_400_000,
    }
    return TextEvent(tenant_id=tenant, **usual | fields)


def made(raw: Producer, payload: bytes) -> None:
    """Send it as a gateway does."""
    raw.produce(TEXTS_TOPIC, payload, headers=proof(TEXTS_TOPIC, payload))


async def test_texts_are_found_by_their_tenant_alone_and_erased(
    telemetry: Telemetry, broker: Any
) -> None:
    await until(telemetry.is_ready)
    raw = Producer({"bootstrap.servers": broker.address})
    gone_ms = round(time.time() * 1000) - 5000
    sent = [
        text(1),
        text(1),
        text(2, "other"),
        text(3, received_at_unix_ms=gone_ms - 5000, expires_at_unix_ms=gone_ms),
        text(4, schema_version=9, prompt="poison"),
    ]
    for one in sent:
        made(raw, one.SerializeToString())
    raw.flush(30)

    async def written() -> float:
        return await telemetry.metric("telemetry_texts_written_total")

    async def found(number: int, tenant: str) -> list[dict[str, Any]]:
        answer = await telemetry.http.get(f"/v1/texts/r{number}", params={"tenant": tenant})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    async def left() -> list[str]:
        return await telemetry.column(
            "SELECT request_id FROM texts FINAL WHERE request_id != 'r3' ORDER BY request_id"
        )

    await until_is(left, ["r1", "r2"])
    [row] = await found(1, "acme")
    assert (row["prompt"], row["redactions"]) == (sent[0].prompt, {"email": 1})
    assert await found(2, "acme") == []
    assert len(await found(2, "other")) == 1
    assert await found(3, "acme") == []  # its time is over, whether a merge took it away or not
    unscoped = await telemetry.http.get("/v1/texts/r1")
    assert unscoped.status_code == 400
    parked = "SELECT payload FROM poison WHERE topic = 'sluice.texts.v1'"
    await until_is(lambda: telemetry.column(parked), [""])
    # The server would fail at this again and again, and begin nothing after it.
    with suppress(DatabaseError):  # of a server that waits for it
        await telemetry.column("ALTER TABLE texts DELETE WHERE throwIf(length(request_id) > 0)")
    stuck = "SELECT count() FROM system.mutations WHERE NOT is_done AND latest_fail_reason != ''"
    stuck += " AND database = currentDatabase()"
    await until_is(lambda: telemetry.column(stuck), [1])
    before = await written()
    erased = await telemetry.http.delete("/v1/texts", params={"tenant": "acme"})
    assert erased.status_code == 200, erased.text
    assert await found(1, "acme") == []
    made(raw, text(5, received_at_unix_ms=gone_ms).SerializeToString())  # late
    after_ms = round(time.time() * 1000) + SKEW_S * 1000 + 5000
    later = text(6, received_at_unix_ms=after_ms, expires_at_unix_ms=after_ms + 86_400_000)
    made(raw, later.SerializeToString())
    raw.flush(30)
    await until_is(written, before + 2)
    assert (len(await found(5, "acme")), len(await found(6, "acme"))) == (0, 1)
    await until_is(left, ["r2", "r6"])


async def until_is(look: Callable[[], Any], wanted: object) -> None:
    async with asyncio.timeout(WAIT_S):
        while await look() != wanted:  # noqa: ASYNC110 - other processes tell nobody
            await asyncio.sleep(0.05)
