"""One request, from the real trace store over HTTP: its event, copies, closings, and why not."""

import hashlib
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from google.protobuf.json_format import ParseDict

from sluice.wire.router.v1.router_pb2 import Candidate, Explanation
from sluice.wire.telemetry.v1.telemetry_pb2 import Attempt, RequestEvent, ToolCall
from telemetry.closings import Closer
from telemetry.http import TelemetryApi
from telemetry.metrics import TelemetryMetrics
from telemetry.progress import IngestProgress
from telemetry.queries import RequestFilter, recent_requests
from telemetry.rows import RowBatch
from telemetry.sink import Sink
from telemetry.store import Store
from telemetry.traces import PLACED_EVENTS
from tests.integration.trace_site import emptied_store

pytestmark = pytest.mark.real

ADMIN_KEY = "admin-key-of-the-test"


@pytest_asyncio.fixture
async def store(shared_tracestore: Any) -> AsyncIterator[Store]:
    async with emptied_store(shared_tracestore.address) as found:
        yield found


@pytest_asyncio.fixture
async def http(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    """The service's API on that store; its sink does not run."""
    metrics = TelemetryMetrics()

    def nothing_to_read() -> Any:
        raise AssertionError

    sink = Sink(nothing_to_read, store, metrics, batch_max=1)
    key_sha256 = hashlib.sha256(ADMIN_KEY.encode()).hexdigest()
    closer = Closer(store, metrics, settle_s=0.0)
    runner = web.AppRunner(
        TelemetryApi(store, sink, IngestProgress(), closer, metrics, key_sha256).application()
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
        headers={"Authorization": f"Bearer {ADMIN_KEY}"},
        timeout=30,
    ) as client:
        yield client
    await runner.cleanup()


def event(event_id: str, request_id: str, **fields: Any) -> RequestEvent:
    return RequestEvent(
        **{
            "schema_version": 1,
            "event_id": event_id,
            "received_at_unix_ms": int(time.time() * 1000),
            "request_id": request_id,
            "tenant_id": "ten_a",
            "model": "m",
            "session_hash": 1 << 63,
            "outcome": "stop",
            "status": 200,
        }
        | fields
    )


async def trace(http: httpx.AsyncClient, request_id: str, **query: str) -> dict[str, Any]:
    answer = await http.get(f"/v1/requests/{request_id}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_request_comes_with_its_copies_and_namesakes(
    store: Store, http: httpx.AsyncClient
) -> None:
    now_ms = int(time.time() * 1000)
    told = event("e1", "r1", received_at_unix_ms=now_ms, ttft_us=12, total_us=34, resumes=2)
    copy = event("e1-copy", "r1-copy", is_copy=True, model="next")
    older = event("e0", "r1", received_at_unix_ms=now_ms - 1000, outcome="length")
    foreign = event("e2", "r1", tenant_id="ten_b", received_at_unix_ms=now_ms + 1)
    await store.insert(RowBatch([told, copy, older, event("e3", "r10")]))
    await store.insert(RowBatch([told, foreign]))  # one of them again
    found = await trace(http, "r1", tenant="ten_a")
    request = found["request"]
    assert (request["event_id"], request["resumes"], request["ttft_us"]) == ("e1", 2, 12)
    assert request["session_hash"] == "8000000000000000"
    assert [it["event_id"] for it in found["copies"]] == ["e1-copy"]
    assert [it["event_id"] for it in found["others"]] == ["e0"]
    assert (found["is_settled"], found["closings"], found["ingested_until"]) == (True, [], None)
    # Who may see all sees the latest of all.
    everybody = await trace(http, "r1")
    assert everybody["request"]["tenant_id"] == "ten_b"
    assert [it["event_id"] for it in everybody["others"]] == ["e1", "e0"]
    assert (await trace(http, "r1-copy"))["request"]["is_copy"]
    # A client may name its request as a copy of another one would be.
    await store.insert(RowBatch([event("e9", "r1-copy", received_at_unix_ms=now_ms + 9)]))
    assert await trace(http, "r1") == everybody
    assert (await trace(http, "r1-copy"))["request"]["event_id"] == "e9"


async def test_a_resumed_request_is_shown_with_its_replicas_and_decisions(
    store: Store, http: httpx.AsyncClient
) -> None:
    known = Explanation(chosen="r1", candidates=[Candidate(replica_id="r1", cost_us=1 << 40)])
    lost = Attempt(replica_id="r1", outcome="replica_lost", decision=known.SerializeToString())
    done = Attempt(number=1, replica_id="r2", outcome="stop", first_us=7, decision=b"\xff")
    told = event("e1", "r1", resumes=1, attempts=[lost, done])
    await store.insert(RowBatch([told]))
    await store.insert(RowBatch([told, event("e2", "r2"), event("e3", "r1", tenant_id="ten_b")]))
    first, second = (await trace(http, "r1", tenant="ten_a"))["attempts"]
    assert (first["replica_id"], first["outcome"]) == ("r1", "replica_lost")
    assert (second["number"], second["first_us"], second["decision"]) == (1, 7, None)
    assert ParseDict(first["decision"], Explanation()) == known
    assert (await trace(http, "r2"))["attempts"] == []


async def test_closings_stand_for_a_request_until_its_row_is_there(
    store: Store, http: httpx.AsyncClient
) -> None:
    now_ms = int(time.time() * 1000)
    closings = [
        event("e1", "r1", schema_version=2, outcome="gateway_lost", status=500, **fields)
        for fields in (
            {"router_id": "router-1", "output_tokens": 5, "received_at_unix_ms": now_ms},
            {"router_id": "router-2", "output_tokens": 9, "received_at_unix_ms": now_ms},
            {"router_id": "router-2", "output_tokens": 7, "received_at_unix_ms": now_ms},
        )
    ]
    await store.insert(RowBatch(closings=closings))
    found = await trace(http, "r1")
    assert not found["is_settled"]
    assert found["request"]["outcome"] == "gateway_lost"
    told = [(it["router_id"], it["output_tokens"]) for it in found["closings"]]
    assert told == [("router-2", 9), ("router-1", 5)]
    await store.insert(RowBatch([event("e1", "r1", received_at_unix_ms=now_ms)]))
    found = await trace(http, "r1")
    assert (found["is_settled"], found["request"]["outcome"]) == (True, "stop")
    assert len(found["closings"]) == 2


async def test_a_missing_request_is_answered_with_the_reason_to_allowed_callers(
    store: Store, http: httpx.AsyncClient
) -> None:
    await store.insert(RowBatch([event("e1", "r1")]))
    for path, query in (("r2", {}), ("r1", {"tenant": "ten_b"}), ("r1' OR 1=1 --", {})):
        answer = await http.get(f"/v1/requests/{path}", params=query)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        assert "it has not ended" in answer.json()["detail"]
    assert (await http.get("/v1/requests/" + "x" * 300)).status_code == 400
    refused = await http.get("/v1/requests/r1", headers={"Authorization": "Bearer nobody's"})
    assert refused.status_code == 401


async def test_calls_of_tools_are_told_with_their_request_and_in_usage(
    store: Store, http: httpx.AsyncClient
) -> None:
    asked = event("evt_1", "req_tools")
    calls = [
        event(
            f"evt_c{number}",
            "req_tools",
            schema_version=5,
            key_id="key_1",
            tool_call=ToolCall(
                label="http", name="weather", duration_us=500_000, outcome=outcome, price_micros=3
            ),
        )
        for number, outcome in enumerate(("answered", "failed"))
    ]
    await store.insert(RowBatch(events=[asked], tool_calls=calls))
    await store.insert(RowBatch(tool_calls=calls))  # a second delivery
    told = (await http.get("/v1/requests/req_tools")).json()
    assert [it["outcome"] for it in told["tool_calls"]] == ["answered", "failed"]
    (row,) = (await http.get("/v1/usage/tools", params={"tenant": "ten_a"})).json()["data"]
    assert (row["label"], row["name"], row["calls"], row["failed_calls"]) == (
        *("http", "weather"),
        *(2, 1),
    )
    assert (row["seconds"], row["price_micros"]) == (1.0, 6)
    other = await http.get("/v1/usage/tools", params={"tenant": "ten_b"})
    assert other.json()["data"] == []


async def test_the_newest_requests_of_all_tenants_are_found_by_time(store: Store) -> None:
    now_ms = int(time.time() * 1000)
    events = [
        event(
            f"e{number:03}",
            f"r{number}",
            tenant_id=f"ten_{number % 50}",
            received_at_unix_ms=now_ms - 10_000 * number,
            status=500 if number % 10 == 0 else 200,
        )
        for number in range(400)
    ]
    await store.insert(RowBatch(events))
    await store.insert(RowBatch(events[:5]))  # again
    found = await recent_requests(store, RequestFilter(), limit=20)
    assert [it["event_id"] for it in found] == [f"e{number:03}" for number in range(20)]
    failed = await recent_requests(store, RequestFilter(statuses=(500, 599)), limit=5)
    assert [it["event_id"] for it in failed] == [f"e{number:03}" for number in range(0, 50, 10)]
    [own, *others] = await recent_requests(store, RequestFilter(tenant_id="ten_7"), limit=3)
    assert {it["tenant_id"] for it in [own, *others]} == {"ten_7"}
    # All columns are the same, so that an answer does not depend on the table.
    newest = await recent_requests(store, RequestFilter(), limit=8)
    assert newest[-1] == own


async def test_tables_by_time_and_id_follow_the_columns_of_requests(store: Store) -> None:
    columns = await store.query(
        "SELECT table, groupArray((name, type)) AS columns FROM system.columns WHERE database ="
        " currentDatabase() AND table IN ('requests', 'recent_requests',"
        " 'recent_requests_of_requests') GROUP BY table",
        {},
    )
    first, *rest = [sorted(row["columns"]) for row in columns]
    assert len(rest) == 2
    assert all(it == first for it in rest)


async def test_a_request_from_before_the_table_of_ids_is_found(
    store: Store, http: httpx.AsyncClient
) -> None:
    await store.insert(RowBatch([event("e1", "r1"), event("e2", "r2")]))
    await store.write("TRUNCATE TABLE request_ids", {})
    assert (await trace(http, "r1"))["request"]["event_id"] == "e1"


async def test_a_request_is_found_by_its_place_among_many(store: Store) -> None:
    """The store reads one granule of each table, where the index that skips would read many."""
    await store.write(_MANY, {})
    parameters = {"id": "r170000", "copy": "r170000-copy", "tenant": "", "limit": 50}
    plan = await store.query(f"EXPLAIN indexes = 1, json = 1 {PLACED_EVENTS}", parameters)
    text = "".join(next(iter(row.values())) for row in plan)
    read = [int(it) for it in re.findall(r'"Selected Granules": (\d+)', text)]
    assert read
    assert read[-1] <= 2, text
    assert (await store.query(PLACED_EVENTS, parameters))[0]["event_id"] == "e170000"


_MANY = """
INSERT INTO requests (event_id, request_id, received_at, tenant_id)
SELECT concat('e', toString(number)), concat('r', toString(number)),
    now64(3) - toIntervalSecond(number % 86400), concat('ten_', toString(number % 100))
FROM numbers(200000)
"""
