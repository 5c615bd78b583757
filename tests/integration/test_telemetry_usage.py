"""The ledger, from the real trace store over HTTP, against plain sums."""

import asyncio
import csv
import hashlib
import io
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from random import Random
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from typer.testing import CliRunner

from cli.app import app
from control_plane.budgets.feed import open_feed
from control_plane.budgets.model import BudgetSpan, Usage
from control_plane.telemetry_client import FeedDownError
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent, TokenCount
from telemetry.closings import Closer
from telemetry.http import TelemetryApi
from telemetry.metrics import TelemetryMetrics
from telemetry.progress import IngestProgress
from telemetry.rows import RowBatch
from telemetry.sink import Sink
from telemetry.store import Store
from tests.integration.trace_site import emptied_store

pytestmark = pytest.mark.real

ADMIN_KEY = "admin-key-of-the-test"
HOUR_MS = 3_600_000
TOTALS = (
    *("requests", "failed_requests", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("withheld_tokens", "unbilled_tokens"),
)


@pytest_asyncio.fixture
async def store(shared_tracestore: Any) -> AsyncIterator[Store]:
    async with emptied_store(shared_tracestore.address) as found:
        yield found


@pytest_asyncio.fixture
async def http(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    """The service's API on that store; its sink does not run."""
    metrics, progress = TelemetryMetrics(), IngestProgress()
    progress.until_ms = int(time.time() * 1000)

    def nothing_to_read() -> Any:
        raise AssertionError

    sink = Sink(nothing_to_read, store, metrics, batch_max=1)
    key_sha256 = hashlib.sha256(ADMIN_KEY.encode()).hexdigest()
    closer = Closer(store, metrics, settle_s=0.0)
    closer.until_ms = progress.until_ms
    api = TelemetryApi(store, sink, progress, closer, metrics, key_sha256)
    runner = web.AppRunner(api.application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
        headers={"Authorization": f"Bearer {ADMIN_KEY}"},
        timeout=30,
    ) as client:
        yield client
    await runner.cleanup()


def random_event(random: Random, number: int, received_ms: int) -> RequestEvent:
    failed = random.random() < 0.3
    placed = not failed or random.random() < 0.5
    return RequestEvent(
        schema_version=1,
        event_id=f"e{number}",
        received_at_unix_ms=received_ms,
        tenant_id=random.choice(["ten_a", "ten_b"]),
        key_id=random.choice(["key_1", "key_2"]),
        model=random.choice(["m", "n"]),
        endpoint=random.choice(["/v1/chat/completions", "/v1/embeddings"]),
        replica_id="r1" if placed else "",
        prompt_tokens=random.randrange(2**32),
        cached_tokens=random.randrange(2**32) if placed else 0,
        output_tokens=random.randrange(2**32) if placed else 0,
        withheld_tokens=random.randrange(2**20) if placed else 0,
        unbilled_tokens=random.choice([0, 77]) if placed else 0,
        outcome="engine_failed" if failed else "stop",
        status=502 if failed else 200,
        is_copy=random.random() < 0.2,
    )


def totals_of(events: Iterable[RequestEvent], length_ms: int) -> dict[tuple[str, ...], Any]:
    """Return what the ledger must say, by start, tenant, key and model."""
    found: dict[tuple[str, ...], Counter[str]] = {}
    for event in events:
        if event.is_copy:
            continue
        start_s = event.received_at_unix_ms // length_ms * length_ms // 1000
        start = datetime.fromtimestamp(start_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        total = found.setdefault((start, event.tenant_id, event.key_id, event.model), Counter())
        total["requests"] += 1
        total["failed_requests"] += event.status >= 400
        is_computed = event.status < 400 or event.replica_id or "embeddings" in event.endpoint
        total["prompt_tokens"] += event.prompt_tokens if is_computed else 0
        total["cached_tokens"] += event.cached_tokens
        for name in ("output_tokens", "withheld_tokens", "unbilled_tokens"):
            total[name] += getattr(event, name)
    return {key: {name: total[name] for name in TOTALS} for key, total in found.items()}


def told(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, ...], Any]:
    ids = ("start", "tenant_id", "key_id", "model")
    return {
        tuple(row[name] for name in ids): {name: int(row[name]) for name in TOTALS} for row in rows
    }


async def sluice(*words: str) -> str:
    """Run `sluice usage`; the API is served by this loop."""
    done = await asyncio.to_thread(CliRunner().invoke, app, ["usage", *words])
    assert done.exit_code == 0, done.output
    return done.output


async def test_the_ledger_is_the_sum_of_the_events(
    store: Store, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(7)
    now_ms = int(time.time() * 1000)
    events = [
        random_event(random, number, now_ms - random.randrange(72 * HOUR_MS))
        for number in range(2_000)
    ]
    await store.insert(RowBatch(events))
    await store.insert(RowBatch(random.sample(events, 700)))  # again, in a part that is not merged
    span = {"from": iso(now_ms - 80 * HOUR_MS), "to": iso(now_ms + 1)}
    for granularity, length_ms in (("hour", HOUR_MS), ("day", 24 * HOUR_MS)):
        expected = totals_of(events, length_ms)
        query = span | {"granularity": granularity}
        answer = (await http.get("/v1/usage", params=query)).json()
        assert told(answer["data"]) == expected
        text = (await http.get("/v1/usage", params=query | {"format": "csv"})).text
        assert told(csv.DictReader(io.StringIO(text))) == expected
        file = (await http.get("/v1/usage", params=query | {"format": "parquet"})).content
        assert file[:4] == file[-4:] == b"PAR1"
        # Whatever is asked for one tenant, key or model is about that alone.
        for name, one in (("tenant", "ten_b"), ("key", "key_1"), ("model", "n")):
            answer = (await http.get("/v1/usage", params=query | {name: one})).json()
            assert told(answer["data"]) == {key: it for key, it in expected.items() if one in key}
    # The command line says the same.
    monkeypatch.setenv("SLUICE_TELEMETRY_URL", str(http.base_url))
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)
    found = json.loads(await sluice("--since", "80h", "--by", "day", "--json"))
    assert told(found["data"]) == expected
    text = await sluice("--since", "80h", "--by", "day", "--csv")
    assert told(csv.DictReader(io.StringIO(text))) == expected
    text = await sluice("--since", "80h", "--tenant", "ten_a")
    of_a = [event for event in events if event.tenant_id == "ten_a" and not event.is_copy]
    assert ["total", str(len(of_a))] in [line.split()[:2] for line in text.splitlines()]
    nobody = await http.get("/v1/usage", params=span | {"tenant": "x' OR 1=1 --"})
    assert nobody.json()["data"] == []


async def test_budgets_get_the_sums_of_the_ledger_for_the_tenants_they_ask_for(
    store: Store, http: httpx.AsyncClient
) -> None:
    random, now_ms = Random(3), int(time.time() * 1000)
    events = [
        random_event(random, number, now_ms - random.randrange(8 * HOUR_MS))
        for number in range(500)
    ]
    await store.insert(RowBatch(events))
    await store.insert(RowBatch(events[:200]))
    span = BudgetSpan(now_ms - 4 * HOUR_MS, now_ms - HOUR_MS)
    within = [it for it in events if span.start_ms <= it.received_at_unix_ms < span.end_ms]
    expected: Counter[tuple[str, str, str]] = Counter()
    for (_, tenant_id, _, model), sums in totals_of(within, 1).items():
        for name, value in sums.items():
            expected[tenant_id, model, name] += value
    async with open_feed(str(http.base_url), ADMIN_KEY) as feed:
        both = await feed.usage(span, {"ten_a", "ten_b", "ten_c"}, {"m", "n", "o"})
        assert both.usage == {
            (tenant_id, model): Usage(
                expected[tenant_id, model, "requests"],
                expected[tenant_id, model, "prompt_tokens"],
                expected[tenant_id, model, "cached_tokens"],
                expected[tenant_id, model, "output_tokens"]
                - expected[tenant_id, model, "unbilled_tokens"],
            )
            for tenant_id in ("ten_a", "ten_b")
            for model in ("m", "n")
        }
        assert 0 < both.ingested_until_ms <= int(time.time() * 1000)
        one = await feed.usage(span, {"ten_b"}, {"m"})
        assert one.usage == {
            ("ten_b", "m"): both.usage["ten_b", "m"],
            ("ten_b", ""): both.usage["ten_b", "n"],
        }
        assert one.by_tenant() == {"ten_b": both.by_tenant()["ten_b"]}
        with pytest.raises(FeedDownError, match="at most 31 days"):
            await feed.usage(BudgetSpan(0, now_ms), {"ten_b"}, ())
    async with open_feed(str(http.base_url), "another key") as stranger:
        with pytest.raises(FeedDownError, match="answers 401"):
            await stranger.usage(span, {"ten_b"}, ())


async def test_a_late_event_corrects_its_hour_and_is_reported(
    store: Store, http: httpx.AsyncClient
) -> None:
    now_ms = int(time.time() * 1000)
    random = Random(1)
    in_time, late = (
        random_event(random, number, received_ms)
        for number, received_ms in enumerate((now_ms, now_ms - 30 * HOUR_MS))
    )
    in_time.is_copy = late.is_copy = False
    await store.insert(RowBatch([in_time, late]))
    query = {"from": iso(now_ms - 40 * HOUR_MS), "to": iso(now_ms + 1)}
    answer = (await http.get("/v1/usage", params=query)).json()
    first, second = answer["data"]
    assert (first["requests"], first["late_requests"]) == (1, 1)
    assert first["start"] < answer["closed_until"] <= second["start"]
    assert abs(datetime.fromisoformat(first["corrected_at"]).timestamp() - now_ms / 1000) < 600
    assert (second["requests"], second["late_requests"], second["corrected_at"]) == (1, 0, "")


async def test_the_ledger_is_compared_with_the_counters_of_engines(
    store: Store, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour_ms = (int(time.time() * 1000) - 5 * HOUR_MS) // HOUR_MS * HOUR_MS
    events = [random_event(Random(number), number, hour_ms + number) for number in range(20)]
    made = Counter[str]()
    for event in events:
        made[event.model] += event.output_tokens
    lost = events[0]  # another model had begun it
    lost.lost_model, lost.lost_prompt_tokens, lost.lost_output_tokens = "gone", 40, 4
    made["gone"] += 4
    computed = Counter({"gone": 40 + 1})
    for event in events:
        if event.replica_id:
            computed[event.model] += event.prompt_tokens
    made["n"] += 3  # of a request that nobody told of
    counts = [
        RequestEvent(
            schema_version=3,
            received_at_unix_ms=hour_ms,
            model=model,
            count=TokenCount(
                epoch=1,
                number=1,
                output_tokens=tokens,
                has_prompts=True,
                prompt_tokens=computed[model],
                is_last=True,
            ),
        )
        for model, tokens in {**made, "": 0}.items()
    ]
    await store.insert(RowBatch(events, counts=counts))
    answer = (await http.get("/v1/usage/reconciliation")).json()
    assert answer["mismatch_tokens"] == 4
    names = ("state", "difference_tokens", "prompt_difference_tokens")
    found = {row["model"]: tuple(row[name] for name in names) for row in answer["data"]}
    assert found == {"m": ("equal", 0, 0), "n": ("differs", -3, 0), "gone": ("differs", 0, -1)}
    refused = await http.get("/v1/usage/reconciliation", params={"tenant": "ten_a"})
    assert refused.status_code == 400
    monkeypatch.setenv("SLUICE_TELEMETRY_URL", str(http.base_url))
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)
    text = await sluice("--reconcile", "--model", "n")
    assert "closed hours differ by 3 tokens" in text
    assert json.loads(await sluice("--reconcile", "--model", "m", "--json"))["data"]


async def test_mistakes_are_named(http: httpx.AsyncClient) -> None:
    for query, param in (
        ({"from": "yesterday"}, "from"),
        ({"to": "2200-01-01"}, "to"),
        ({"from": "2026-02-02T00:00:00Z", "to": "2026-02-01T00:00:00Z"}, "from"),
        ({"from": "2024-01-01", "to": "2026-01-01"}, "from"),
        ({"granularity": "minute"}, "granularity"),
        ({"format": "xml"}, "format"),
        ({"tenant": "x" * 300}, "tenant"),
    ):
        answer = await http.get("/v1/usage", params=query)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
        assert answer.json()["detail"].startswith(param)
    anonymous = await http.get("/v1/usage", headers={"Authorization": ""})
    assert anonymous.status_code == 401


def iso(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat()
