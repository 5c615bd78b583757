"""Costs, from the real trace store over HTTP and by the command, against plain sums."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from typer.testing import CliRunner

from cli.app import app
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from telemetry.closings import Closer
from telemetry.costs.model import HOUR_MS
from telemetry.costs.prices import Prices
from telemetry.costs.recorded import RecordedHours
from telemetry.http import TelemetryApi
from telemetry.metrics import TelemetryMetrics
from telemetry.progress import IngestProgress
from telemetry.rollups_worker import Rollups
from telemetry.rows import RowBatch
from telemetry.sink import Sink
from telemetry.store import Store
from tests.integration.conftest import ADMIN_KEY as CONTROL_KEY
from tests.integration.trace_site import emptied_store

pytestmark = pytest.mark.real

ADMIN_KEY = "admin-key-of-the-test"
_POOL = {
    "accelerator": "a",
    "replicas": 2,
    "accelerators_per_replica": 2,
    "parameters": 1e9,
    "bytes_per_parameter": 2,
    "kv_bytes_per_token": 1000,
}
_KIND = {"price_per_hour": "3", "memory_bandwidth_gb_s": 1000, "tflops": 100}
_API = {"prompt_per_million": 50, "cached_per_million": 5, "output_per_million": 400}
PRICES = {
    "currency": "EUR",
    "accelerators": {"a": _KIND},
    "pools": {"p": _POOL},
    "apis": {"other": _API},
}


@pytest_asyncio.fixture
async def store(shared_tracestore: Any) -> AsyncIterator[Store]:
    async with emptied_store(shared_tracestore.address) as found:
        yield found


@pytest_asyncio.fixture(params=[True])
async def http(
    store: Store, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """The service's API on that store, with a price list or without."""
    prices = Prices.model_validate(PRICES) if request.param else None
    async with serving(store, prices, RecordedHours("", ""), monkeypatch) as client:
        yield client


@asynccontextmanager
async def serving(
    store: Store, prices: Prices | None, recorded: RecordedHours, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the API; its sink does not run."""
    metrics, progress = TelemetryMetrics(), IngestProgress()

    def nothing_to_read() -> Any:
        raise AssertionError

    sink = Sink(nothing_to_read, store, metrics, batch_max=1)
    key_sha256 = hashlib.sha256(ADMIN_KEY.encode()).hexdigest()
    closer = Closer(store, metrics, settle_s=0.0)
    api = TelemetryApi(store, sink, progress, closer, metrics, key_sha256, prices, recorded)
    runner = web.AppRunner(api.application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    monkeypatch.setenv("SLUICE_TELEMETRY_URL", url)
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
        yield client
    await runner.cleanup()


def event(number: int, received_ms: int, length_ms: int, **changes: Any) -> RequestEvent:
    queue_ms = changes.pop("queue_ms", 0)
    fields: dict[str, Any] = {
        "schema_version": 1,
        "event_id": f"e{number}",
        "received_at_unix_ms": received_ms,
        "tenant_id": "ten_a",
        "model": "m",
        "pool_id": "p",
        "replica_id": "r1",
        "endpoint": "/v1/chat/completions",
        "prompt_tokens": 1000,
        "cached_tokens": 400,
        "output_tokens": 100,
        "queue_us": queue_ms * 1000,
        "total_us": (queue_ms + length_ms) * 1000,
        "status": 200,
    }
    return RequestEvent(**fields | changes)


def iso(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat()


def an_hour_ago_ms(hours: int) -> int:
    return int(time.time() * 1000) // HOUR_MS * HOUR_MS - hours * HOUR_MS


async def sluice(*words: str) -> Any:
    """Run `sluice cost`; the API is served by this loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["cost", *words])


async def test_time_on_replicas_is_a_union_and_requests_are_cut_at_hours(
    store: Store, http: httpx.AsyncClient
) -> None:
    hour = an_hour_ago_ms(5)
    events = [
        event(1, hour, 60_000),
        event(2, hour + 30_000, 60_000, queue_ms=30_000),  # from 60 s to 120 s
        event(3, hour + 90_000, 60_000),  # beside the one before, until 150 s
        event(4, hour, 60_000, replica_id="r2"),
        # Half of it in the next hour.
        event(
            5, hour + HOUR_MS - 600_000, 1_200_000, replica_id="r2", tenant_id="ten_b", choices=2
        ),
        event(6, hour, 60_000, replica_id=""),  # refused: it was nowhere
        event(7, hour, 60_000, pool_id="unknown", replica_id="r9"),
        # As long as an event can tell; it began before the span.
        event(8, hour - 4_000_000, 4_200_000, replica_id="r2"),
    ]
    await store.insert(RowBatch(events))
    await store.insert(RowBatch(events[:4]))  # again
    span = {"from": iso(hour), "to": iso(hour + 2 * HOUR_MS)}
    found = (await http.get("/v1/costs", params=span | {"format": "work"})).json()
    busy = {(it["pool_id"], it["start_ms"]): it for it in found["busy"]}
    first, second = busy["p", hour], busy["p", hour + HOUR_MS]
    assert (first["busy_s"], first["request_s"]) == (150 + 200 + 600, 60 * 4 + 200 + 600)
    assert (second["busy_s"], second["request_s"]) == (600, 600)
    of_b = [it for it in found["work"] if it["tenant_id"] == "ten_b"]
    assert [it["requests"] for it in of_b] == [0.5, 0.5]
    assert [it["output_tokens"] for it in of_b] == [50, 50]
    assert of_b[0]["attended_tokens"] == 0.5 * 100 * (1000 + 25)
    answer = (await http.get("/v1/costs", params=span | {"by": "tenant"})).json()
    rows = {(row["name"], row["kind"]): row for row in answer["data"]}
    assert rows["ten_a", "use"]["requests"] == pytest.approx(4 + 200 / 4200, abs=1e-3)
    # 4 accelerators at 3.00 for 2 hours; (950 + 600) s of 2 of them were busy.
    assert answer["total_micros"] == 24_000_000 == sum(it["cost_micros"] for it in answer["data"])
    assert rows["", "idle"]["cost_micros"] == 24_000_000 - round(1550 / 3600 * 2 * 3_000_000)
    assert answer["unpriced_requests"] == {"unknown": 1.0}


async def test_every_view_adds_up_and_a_tenant_sees_its_own_share_alone(
    store: Store, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    random = Random(3)
    hour = an_hour_ago_ms(30)
    events = [
        event(
            number,
            hour + random.randrange(20 * HOUR_MS),
            random.randrange(1, 200_000),
            tenant_id=random.choice(["ten_a", "ten_b"]),
            model=random.choice(["m", "n"]),
            replica_id=random.choice(["r1", "r2"]),
            output_tokens=random.randrange(2000),
            is_copy=random.random() < 0.1,
        )
        for number in range(500)
    ]
    await store.insert(RowBatch(events))
    span = {"from": iso(hour + 12_345), "to": iso(hour + 20 * HOUR_MS - 54_321)}
    whole = round(12 * (20 * HOUR_MS - 12_345 - 54_321) / HOUR_MS * 1e6)
    for by in ("pool", "model", "tenant", "hour"):
        for spread in ("true", "false"):
            query = span | {"by": by, "spread_idle": spread}
            answer = (await http.get("/v1/costs", params=query)).json()
            assert answer["total_micros"] == whole
            assert sum(row["cost_micros"] for row in answer["data"]) == whole
            kinds = {row["kind"] for row in answer["data"]}
            assert kinds == {"use", "copies"} | ({"idle"} if spread == "false" else set())
            own = (await http.get("/v1/costs", params=query | {"tenant": "ten_a"})).json()
            assert own.keys() == {"from", "to", "by", "currency", "data", "total_micros"}
            assert {row["kind"] for row in own["data"]} == {"use"}
            if by == "tenant":
                [row] = own["data"]
                assert row in answer["data"]
                assert own["total_micros"] == row["cost_micros"]
    [even] = answer["break_even"]
    assert (even["pool_id"], even["api"]) == ("p", "other")
    # The same prices in a file of the caller's say the same.
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(PRICES))
    words = ("--from", span["from"], "--to", span["to"], "--by", "tenant", "--json")
    ours = await sluice(*words, "--prices", str(path))
    theirs = await sluice(*words)
    assert ours.exit_code == theirs.exit_code == 0, ours.output + theirs.output
    assert json.loads(ours.output) == json.loads(theirs.output)
    assert json.loads(ours.output)["total_micros"] == whole
    drawn = tmp_path / "cost.svg"
    shown = await sluice(*words[:-1], "--volume", "500M", "--svg", str(drawn))
    assert shown.exit_code == 0, shown.output
    assert "ten_b" in shown.output
    assert drawn.read_text().startswith("<svg")
    given = await sluice(*words, "--prices", str(path), "--accelerator-hours", "p=100")
    assert json.loads(given.output)["total_micros"] == 300_000_000


async def test_sums_of_hours_equal_the_sums_of_events(
    store: Store, http: httpx.AsyncClient
) -> None:
    random = Random(4)
    day_ms = 24 * HOUR_MS
    midnight = an_hour_ago_ms(0) // day_ms * day_ms - day_ms
    events = [
        event(
            number,
            midnight + random.randrange(-3 * HOUR_MS, 3 * HOUR_MS),
            random.randrange(1, 4_000_000),
            tenant_id=random.choice(["ten_a", "ten_b"]),
            model=random.choice(["m", "n"]),
            replica_id=random.choice(["r1", "r2"]),
            output_tokens=random.randrange(2000),
            is_copy=random.random() < 0.1,
        )
        for number in range(300)
    ]
    span = {"from": iso(midnight - 3 * HOUR_MS), "to": iso(midnight + 4 * HOUR_MS)}

    async def both(by: str) -> tuple[dict[str, Any], dict[str, Any]]:
        query = span | {"by": by}
        exact = (await http.get("/v1/costs", params=query)).json()
        summed = (await http.get("/v1/costs", params=query | {"sums": "true"})).json()
        assert summed.pop("as_of")
        return exact, summed

    await store.insert(RowBatch(events[:200]))
    exact, summed = await both("model")  # there are no sums yet: events are read
    assert exact == summed
    rollups = Rollups(store, TelemetryMetrics(), settle_ms=-1)
    rollups._sums = rollups._sums[-1:]
    await _rolled(store, rollups)
    for by in ("model", "tenant", "pool", "hour"):
        exact, summed = await both(by)
        assert rounded(exact) == rounded(summed)
    late = [*events[200:], event(1_000, midnight - HOUR_MS, 4_000_000)]  # goes on after midnight
    await store.insert(RowBatch(late))
    before, stale = await both("hour")
    assert rounded(before) != rounded(stale)
    await _rolled(store, rollups)
    exact, summed = await both("hour")
    assert rounded(exact) == rounded(summed) == rounded(before)
    refused = await http.get("/v1/costs", params={"sums": "true", "tenant": "ten_a"})
    assert refused.status_code == 400


async def _rolled(store: Store, rollups: Rollups) -> None:
    """Bring all sums up to what is stored."""
    rollups._hours_at_ms = 0
    await asyncio.sleep(0.01)  # marks are of whole milliseconds
    await rollups.step()


def rounded(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of an answer without what adding in another order changes."""
    rows = {
        (row["name"], row["kind"]): (round(row["requests"], 1), row["prompt_tokens"] // 10)
        for row in answer["data"]
    }
    costs = {(row["name"], row["kind"]): row["cost_micros"] // 1000 for row in answer["data"]}
    return {"rows": rows, "costs": costs, "total": answer["total_micros"]}


@pytest.mark.parametrize("http", [False], indirect=True)
async def test_missing_prices_are_answered_with_the_fix(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    refused = await http.get("/v1/costs")
    assert refused.status_code == 400
    assert "TELEMETRY__PRICES_FILE" in refused.json()["detail"]
    for query in ({"by": "key"}, {"from": "x"}, {"format": "work", "tenant": "t"}):
        assert (await http.get("/v1/costs", params=query)).status_code == 400
    assert (await http.get("/v1/costs", headers={"Authorization": ""})).status_code == 401
    shown = await sluice()
    assert shown.exit_code == 1
    assert "--prices" in shown.output
    path = tmp_path / "prices.toml"
    path.write_text('currency = "EUR"')
    shown = await sluice("--prices", str(path))
    assert shown.exit_code == 1
    assert "pools: Field required" in shown.output


async def test_pools_without_a_replica_count_cost_their_recorded_hours(
    store: Store,
    shared_control_plane: Any,
    postgres_server: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    hour = an_hour_ago_ms(5)
    # Two accelerators for an hour and a half, and half an hour of a replica that may use all.
    intervals = ((hour, hour + HOUR_MS * 3 // 2, 2), (hour + HOUR_MS // 2, hour + HOUR_MS, 0))
    for number, (begin, end, accelerators) in enumerate(intervals):
        await postgres_server.execute(
            "INSERT INTO replica_intervals (replica_id, pool_id, node_id, cell_id, region,"
            " is_running, accelerators, began_at, ended_at) VALUES"
            f" ('r{number}', 'p', 'n', 'p-0', '', true, {accelerators}, '{iso(begin)}',"
            f" '{iso(end)}')",
            "shared",
        )
    await store.insert(RowBatch([event(1, hour, 600_000)]))
    listed = PRICES | {"pools": {"p": {k: v for k, v in _POOL.items() if k != "replicas"}}}
    prices = Prices.model_validate(listed)
    url = str(shared_control_plane.admin.base_url)
    span = {"from": iso(hour), "to": iso(hour + 2 * HOUR_MS)}
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(listed))
    words = ("--from", span["from"], "--to", span["to"], "--by", "hour", "--prices", str(path))
    async with (
        RecordedHours(url, CONTROL_KEY) as recorded,
        serving(store, prices, recorded, monkeypatch) as client,
    ):
        found = (await client.get("/v1/costs", params=span | {"by": "hour"})).json()
        [pool] = found["pools"]
        assert (pool["paid_hours"], pool["paid_by"]) == (4.0, "recorded")
        assert found["total_micros"] == 12_000_000
        by_hour = {row["name"]: 0 for row in found["data"]}
        for row in found["data"]:
            by_hour[row["name"]] += row["cost_micros"]
        assert list(by_hour.values()) == [9_000_000, 3_000_000]
        told = await sluice(*words, "--json")
        assert json.loads(told.output)["data"] == found["data"]
        assert "as the control plane recorded them: p" in (await sluice(*words)).output
        told = await sluice(*words, "--accelerator-hours", "p=5", "--json")
        assert json.loads(told.output)["pools"][0]["paid_by"] == "given"
    for address, key, why in (
        (url, "another key", "answers 401"),
        ("http://127.0.0.1:9", CONTROL_KEY, "does not answer"),
        ("", "", "TELEMETRY__CONTROL_PLANE_URL is not set"),
    ):
        async with (
            RecordedHours(address, key) as recorded,
            serving(store, prices, recorded, monkeypatch) as client,
        ):
            refused = await client.get("/v1/costs", params=span)
            assert (refused.status_code, why in refused.text) == (503, True), refused.text
