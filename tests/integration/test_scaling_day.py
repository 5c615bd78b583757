"""A day of a pool: its requests in a real trace store, replayed and shown by a real control plane."""

import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from sqlalchemy.ext.asyncio import create_async_engine

from control_plane.scaling.minutes import PoolMinute, write_minute
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from telemetry.closings import Closer
from telemetry.http import TelemetryApi
from telemetry.metrics import TelemetryMetrics
from telemetry.progress import IngestProgress
from telemetry.rows import RowBatch
from telemetry.sink import Sink
from telemetry.store import Store
from tests.integration.conftest import ADMIN_KEY, ControlPlane, PostgresServer
from tests.integration.obedient_agent import node
from tests.integration.scaling_cli import Command, scaling_command
from tests.integration.test_control_plane_scaling import (
    BOUNDS,
    DIGEST,
    INTERVAL_S,
    reporting,
)
from tests.integration.trace_site import emptied_store
from tests.support.chromium import BROWSER, opened_chromium

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

TELEMETRY_KEY = "key-of-the-telemetry-service"
Eventually = Callable[..., Awaitable[None]]
TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
IMAGES = Path(__file__).parents[2] / "docs" / "images"
DAY = TODAY - timedelta(days=1)


class TraceSite:
    """A telemetry service on a real trace store. It can be away."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.port = 0
        self.is_away = False

    async def run(self) -> web.AppRunner:
        """Start to serve."""

        def nothing_to_read() -> Any:
            raise AssertionError

        metrics = TelemetryMetrics()
        sink = Sink(nothing_to_read, self.store, metrics, batch_max=1)
        closer = Closer(self.store, metrics, settle_s=0.0)
        key = hashlib.sha256(TELEMETRY_KEY.encode()).hexdigest()
        served = TelemetryApi(self.store, sink, IngestProgress(), closer, metrics, key)
        application = served.application()

        @web.middleware
        async def away(request: web.Request, handler: Any) -> web.StreamResponse:
            return web.Response(status=503) if self.is_away else await handler(request)

        application.middlewares.append(away)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        return runner


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def traces(shared_tracestore: Any) -> AsyncIterator[TraceSite]:
    async with emptied_store(shared_tracestore.address) as store:
        found = TraceSite(store)
        runner = await found.run()
        yield found
        await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plane(
    postgres_server: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
    start_control_plane: Callable[..., Any],
    traces: TraceSite,
) -> AsyncIterator[ControlPlane]:
    """A control plane with telemetry, and one scaled pool whose speed is measured."""
    await postgres_server.execute(f"CREATE DATABASE days TEMPLATE {postgres_server.template}")
    async with (
        start_control_plane(
            postgres_server.url("days"),
            tmp_path_factory.mktemp("days"),
            CONTROL_PLANE__SCALING_INTERVAL_S=str(INTERVAL_S),
            CONTROL_PLANE__TELEMETRY_URL=f"http://127.0.0.1:{traces.port}",
            CONTROL_PLANE__TELEMETRY_KEY=TELEMETRY_KEY,
        ) as found,
        node(found, "node-d", "sim-s"),
    ):
        await found.put(f"bases/{DIGEST}", context_tokens_max=2048)
        await found.put("tiers/gold", ttft_deadline_ms=2000, priority=5)
        await found.put("pools/day", base_digest=DIGEST, engine="sim-s", replicas_wanted=1)
        await found.put("pools/day/scaling", **BOUNDS)
        yield found


@pytest.fixture
def sluice(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Command:
    return scaling_command(plane, monkeypatch)


def events_of_the_day() -> list[RequestEvent]:
    """Return an hour of two requests per 15 s, of which those of ten minutes are late."""
    found: list[RequestEvent] = []
    for number in range(480):
        second = 6 * 3600 + number * 7.5
        is_late = 1200 <= number * 7.5 < 1800
        found.append(
            RequestEvent(
                schema_version=1,
                event_id=f"day{number}",
                received_at_unix_ms=round((DAY.timestamp() + second) * 1000),
                tenant_id=f"ten_{number % 3}",
                tier_id="gold",
                pool_id="day",
                endpoint="/v1/chat/completions",
                prompt_tokens=1000,
                cached_tokens=1000,
                output_tokens=1500,
                is_stream=True,
                ttft_us=9_000_000 if is_late else 100_000,
                status=200,
                outcome="stop",
            )
        )
    return found


async def test_a_day_of_the_trace_store_is_replayed_and_drawn(
    plane: ControlPlane,
    traces: TraceSite,
    sluice: Command,
    eventually: Eventually,
    tmp_path: Path,
) -> None:
    async with reporting(plane.grpc_address, "router-d") as router:
        router.demand["day-0"] = 0.4

        async def is_measured() -> bool:
            rows = (await plane.admin.get("/v1/scaling")).json()["data"]
            return bool(rows[0]["speed"])

        await eventually(is_measured, "the speed of the pool is measured")
    told = await sluice("replay", "day", "--day", DAY.date().isoformat(), status=1)
    assert "no request of pool day" in told
    events = events_of_the_day()
    other = RequestEvent(event_id="x", pool_id="other", output_tokens=10**6)
    other.received_at_unix_ms = events[0].received_at_unix_ms
    await traces.store.insert(RowBatch([*events, other]))
    await traces.store.insert(RowBatch(events[:100]))  # the pipeline is at least once

    picture = tmp_path / "day.svg"
    words = ("replay", "day", "--day", DAY.date().isoformat(), "--max", "1")
    found = json.loads(await sluice(*words, "--plot", str(picture), "--json"))
    assert (found["hours"], found["recorded"]) == (
        24.0,
        {"requests": 480, "violation_minutes": 10},
    )
    # Two requests of 15 replica-seconds in 15 s are the work of two replicas.
    assert found["asked"]["replicas_most"] == 1 < found["present"]["replicas_most"]
    assert found["asked"]["violation_minutes"] > found["present"]["violation_minutes"]
    assert picture.read_text().count("<path") == 8
    assert "ten_" not in json.dumps(found)
    spans = ("replay", "day", "--from", f"{(DAY + timedelta(hours=6)).isoformat()}")
    hour = json.loads(
        await sluice(*spans, "--to", (DAY + timedelta(hours=7)).isoformat(), "--json")
    )
    assert (hour["hours"], hour["recorded"]["requests"]) == (1.0, 480)
    words = (*spans, "--to", (DAY + timedelta(hours=6, minutes=30)).isoformat())
    assert "240 requests" in await sluice(*words)
    traces.is_away = True
    told = await sluice(*words, status=1)
    assert "telemetry answers 503" in told
    assert "--trace" in told
    traces.is_away = False


async def test_the_minutes_of_a_pool_are_shown_with_and_without_telemetry(
    plane: ControlPlane,
    traces: TraceSite,
    sluice: Command,
    eventually: Eventually,
    tmp_path: Path,
) -> None:
    path = "/v1/pools/day/scaling/minutes"

    async def minutes() -> dict[str, Any]:
        return (await plane.admin.get(path)).json()

    async def is_stored() -> bool:
        return any(it is not None for it in (await minutes())["wanted"])

    await traces.store.insert(RowBatch(events_of_the_day()))
    await eventually(is_stored, "the numbers of a minute are stored")
    found = await minutes()
    lengths = {len(found[it]) for it in ("wanted", "ready", "asleep", "demand", "violated")}
    assert lengths <= {1440, 1441}
    assert len(lengths) == 1
    span = {"from": DAY.isoformat(), "to": TODAY.isoformat()}
    day = (await plane.admin.get(path, params=span)).json()
    assert (sum(day["requests"]), sum(day["violated"]), day["missing"]) == (480, 10, "")
    assert day["violated"][379:391] == [False, *[True] * 10, False]
    assert set(day["wanted"]) == {None}
    picture = tmp_path / "day.svg"
    told = await sluice("day", "day", "--day", DAY.date().isoformat(), "--plot", str(picture))
    assert f"{DAY.date().isoformat()} 06:00" in told
    assert "violated (10 minutes)" in picture.read_text()

    traces.is_away = True
    found = await minutes()
    assert (found["violated"], "telemetry answers 503" in found["missing"]) == ([], True)
    assert await is_stored()
    assert "are missing" in await sluice("day", "day")
    traces.is_away = False

    for wrong in ({"from": TODAY.isoformat(), "to": DAY.isoformat()}, {"from": "2020-01-01"}):
        assert (await plane.admin.get(path, params=wrong)).status_code == 400
    assert "there is no pools/daze" in await sluice("day", "daze", status=1)
    await sluice("day", "day", "--day", "yesterday", status=2)
    await sluice("day", "day", "--plot", "day.bmp", status=2)


@pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: apt-get install chromium")
async def test_the_console_draws_a_day_of_a_pool(
    plane: ControlPlane, traces: TraceSite, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    numbers = [
        PoolMinute("day", 3 if 370 <= at < 400 else 1, 1, 0, 1, 0.5 + at / 1000)
        for at in range(1440)
    ]
    engine = create_async_engine(postgres_server.url("days"))
    async with engine.begin() as connection:
        for at, each in enumerate(numbers):
            if not 700 <= at < 720:  # without a leader
                await write_minute(connection, DAY + timedelta(minutes=at), [each])
    await engine.dispose()
    await traces.store.insert(RowBatch(events_of_the_day()))
    async with opened_chromium(tmp_path / "profile", width=1280, height=900) as page:
        await page.open(f"{plane.admin.base_url}/console/#/scaling/day?view=day&day={DAY.date()}")
        await page.until("document.querySelector('input[name=key]')")
        await page.evaluate(
            f"document.querySelector('input[name=key]').value = {json.dumps(ADMIN_KEY)};"
            "document.querySelector('form').requestSubmit()"
        )
        await page.until("document.querySelector('.day svg')")
        count = "document.querySelectorAll('.day {}').length"
        assert await page.evaluate(count.format("path")) == 4
        assert await page.evaluate(count.format("rect.late")) == 10
        line = await page.evaluate("document.querySelector('.day path.ready').getAttribute('d')")
        assert line.count("M") == 2
        values = "[...document.querySelectorAll('.card .value')].map((it) => it.innerText)"
        assert await page.evaluate(values) == ["47", "1", "10", "480"]
        if os.environ.get("SLUICE_SCREENSHOTS"):
            await page.picture(IMAGES / "console-day.webp")
