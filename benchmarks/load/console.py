"""Measures the cost of the console's pages over 50 million requests, and of its live feed.

One operation of `pages` is all requests of one page, one after another, to a real control plane.
PostgreSQL has 10,000 tenants, 1,000 models and 200 replicas. The local trace store has 50 million
requests of 2,000 tenants in the last 30 days, with rollups of hours by the service's own loop.
Queries of pages reach the store through the HTTP API of the telemetry service. `wall_ms` is the
time until the page has all its answers. `cpu_ms` is the CPU time of control plane, telemetry and
store for the page. Not measured: the browser, and telemetry's sink (nothing is written meanwhile).

`live` is the control plane's additional CPU time for 20 viewers of the feed, in percent of a core.
Each time the control plane reads the fleet, the state has changed. Goals are 3 requests and 100 ms
per page, and 1 % for the feed. The benchmark needs 4 GiB of disk. Run:
`python -m benchmarks.load.console [--requests N]`.
"""

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
from aiohttp import web

from benchmarks.micro.trace_month import FILL, MARKS_VIEW, fill_month, roll_month
from benchmarks.results import write_result
from cli.stack import postgres
from cli.stack.tracestore import tracestore_spec
from control_plane.migrate import migrate
from sluice import shared_secret
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.procfs import cpu_s
from telemetry.closings import Closer
from telemetry.costs.prices import read_prices
from telemetry.costs.sums import COST_SUMS
from telemetry.day_sums import USAGE, USAGE_BY_HOUR, DaySums
from telemetry.http import TelemetryApi
from telemetry.metrics import TelemetryMetrics
from telemetry.progress import IngestProgress
from telemetry.settings import StoreSettings
from telemetry.sink import Sink
from telemetry.store import Store

_REQUESTS = 50_000_000
_ROUNDS = 10
_KEY = "sk-of-the-benchmark"
_MINUTE_MS = 60_000
_VIEWERS, _LIVE_S, _LOOK_S = 20, 40.0, 2.0
_TABLES = ("tiers", "bases", "pools", "nodes", "routers", "cells", "replicas", "tenants", "models")
_OBJECTS = (
    "INSERT INTO tiers (id, priority) SELECT 'tier-' || n, n FROM generate_series(1, 4) n",
    "INSERT INTO bases (digest, name) VALUES ('base', 'base')",
    "INSERT INTO pools (id, base_digest, engine, replicas_wanted) "
    "SELECT 'pool-' || n, 'base', 'sim', 10 FROM generate_series(0, 19) n",
    "INSERT INTO nodes (id) SELECT 'node-' || n FROM generate_series(0, 49) n",
    "INSERT INTO routers (id, address) VALUES ('router', '127.0.0.1:1')",
    "INSERT INTO cells (id, pool_id, router_id, router_address, epoch) SELECT 'cell-' || n, "
    "'pool-' || n % 20, 'router', '127.0.0.1:1', 1 FROM generate_series(0, 39) n",
    "INSERT INTO replicas (id, pool_id, cell_id, node_id, state) SELECT 'replica-' || n, "
    "'pool-' || n % 20, 'cell-' || n % 40, 'node-' || n % 50, 3 FROM generate_series(0, 199) n",
    "INSERT INTO tenants (id, name, tier_id, cache_salt, weight) SELECT 'ten_' || n, "
    "'Tenant ' || n, 'tier-' || n % 4 + 1, substr(sha256(n::text::bytea), 1, 16), 1 "
    "FROM generate_series(0, 9999) n",
    "INSERT INTO models (id, base_digest, adapter_digest, release, created_at_unix_s, pool_id) "
    "SELECT 'model-' || n, 'base', encode(sha256(n::text::bytea), 'hex'), '1', 1, "
    "'pool-' || n % 20 FROM generate_series(0, 999) n",
)
# Renews the reports of all objects, because objects without a report become `lost` in seconds.
_ALIVE = (
    "UPDATE routers SET seen_at = now(), is_gone = false",
    "UPDATE nodes SET seen_at = now(), is_lost = false",
    "UPDATE cells SET router_id = 'router', router_address = '127.0.0.1:1'",
)
# A router's report on each cell, whose numbers differ at each read.
_REPORT = """
INSERT INTO cell_demands (cell_id, router_id, epoch, number, report, received_at)
SELECT id, 'router', 1, $1::bigint, jsonb_build_object('running', $1::bigint % 900, 'ready', 5,
    'tiers', jsonb_build_object('0', '[0,0,0,0,7,0]'::jsonb, '100', '[0,0,0,0,3,0]'::jsonb)), now()
FROM cells
ON CONFLICT (cell_id, router_id) DO UPDATE
SET number = excluded.number, report = excluded.report, received_at = now()
"""
_WITH_IDS = FILL.replace("(event_id,", "(request_id, event_id,").replace(
    "SELECT\n", "SELECT\n    concat('req_', lower(hex(cityHash64(number, 8)))),\n", 1
)
_SOME_ID = """
SELECT request_id FROM requests
WHERE tenant_id = 'ten_500' AND received_at > now() - toIntervalDay(20) LIMIT 1
"""
_PRICES = """
currency = "USD"
[accelerators.h200]
price_per_hour = 3.5
memory_bandwidth_gb_s = 4800
tflops = 989
[pools.pool]
accelerator = "h200"
replicas = 8
parameters = 70.6e9
bytes_per_parameter = 2
kv_bytes_per_token = 327_680
"""


def pages(request_id: str) -> dict[str, Sequence[str]]:
    """Return the requests of each page, which must have the same paths as in `console/pages`."""
    data = "/console/data"
    return {
        "overview": [f"{data}/overview"],
        "requests": [f"{data}/requests?limit=100"],
        "requests_of_a_tenant": [f"{data}/requests?limit=100&tenant=ten_500"],
        "requests_that_failed": [f"{data}/requests?limit=100&status=500-599"],
        "request": [f"{data}/requests/{request_id}"],
        "usage": [f"{data}/usage/sums?by=tenant_id"],
        "usage_by_model": [f"{data}/usage/sums?by=model"],
        "usage_over_time": [f"{data}/usage/sums?by=start"],
        "usage_of_a_tenant": [f"{data}/usage?granularity=day&tenant=ten_0"],
        "usage_of_a_day": [f"{data}/usage/sums?by=start&granularity=hour"],
        "costs": [f"{data}/costs?by=model"],
        "tenants": ["/v1/tenants?limit=1000"],
        "tenant": ["/v1/tenants/ten_5", "/v1/tenants/ten_5/keys", "/v1/budgets?tenant_id=ten_5"],
        "models": ["/v1/models?limit=1000"],
        "model": [
            "/v1/models/model-1",
            "/v1/releases?model_id=model-1",
            "/v1/rollouts?model_id=model-1&limit=20",
        ],
        "search": ["/v1/tenants", "/v1/models", "/v1/aliases"],
        "budgets": ["/v1/budgets"],
        "rollouts": ["/v1/rollouts?limit=100"],
        "fleet": ["/v1/replicas", "/v1/nodes", f"{data}/overview"],
        "scaling": ["/v1/scaling", "/v1/scaling/budget"],
        "alerts": ["/v1/alerts?limit=1000&is_firing=true"],
        "audit": ["/v1/audit?limit=100"],
    }


@asynccontextmanager
async def _telemetry(store: Store, home: Path) -> AsyncGenerator[str]:
    """Serve telemetry's API over the store in this process, and yield its URL."""
    metrics, progress = TelemetryMetrics(), IngestProgress()
    progress.until_ms = int(time.time() * 1000)

    def nothing_to_read() -> Any:
        raise AssertionError

    closer = Closer(store, metrics, settle_s=0.0)
    closer.until_ms = progress.until_ms
    prices = home / "prices.toml"
    prices.write_text(_PRICES)
    api = TelemetryApi(
        store,
        Sink(nothing_to_read, store, metrics, batch_max=1),
        progress,
        closer,
        metrics,
        hashlib.sha256(_KEY.encode()).hexdigest(),
        read_prices(prices),
    )
    runner = web.AppRunner(api.application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _control_plane(
    home: Path, telemetry_url: str
) -> AsyncGenerator[tuple[str, ChildProcess, asyncpg.Connection]]:
    """Start PostgreSQL with objects and a control plane, and yield its address."""
    async with AsyncExitStack() as stack:
        await postgres.prepare_postgres(home, fsync=False)
        spec = postgres.postgres_spec(home, 5432, log_file=home / "postgres.log", fsync=False)
        database_server = await ChildProcess.start(spec)
        stack.push_async_callback(database_server.stop)
        await database_server.wait_ready(30)
        url = postgres.database_url(home, 5432)
        await migrate(url)
        sockets = str(postgres.locate(home).sockets)
        database = await asyncpg.connect(
            user="postgres", database=postgres.DATABASE, host=sockets, port=5432
        )
        stack.push_async_callback(database.close)
        for table in _TABLES:
            await database.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        for statement in _OBJECTS:
            await database.execute(statement)
        await database.execute("ANALYZE")
        grpc, http = free_port(), free_port()
        settings = {
            "DATABASE_URL": url,
            "GRPC_ADDRESS": f"127.0.0.1:{grpc}",
            "HTTP_ADDRESS": f"127.0.0.1:{http}",
            "ADMIN_KEY_SHA256": hashlib.sha256(_KEY.encode()).hexdigest(),
            "TELEMETRY_URL": telemetry_url,
            "TELEMETRY_KEY": _KEY,
        }
        spec = ProcessSpec(
            name="control-plane",
            command=[sys.executable, "-m", "control_plane"],
            env={"PATH": os.environ["PATH"], **shared_secret.environment()}
            | {f"CONTROL_PLANE__{key}": value for key, value in settings.items()},
            log_file=home / "control-plane.log",
            ready=lambda: port_answers("127.0.0.1", http),
        )
        child = await ChildProcess.start(spec)
        stack.push_async_callback(child.stop)
        await child.wait_ready(60)
        yield f"http://127.0.0.1:{http}", child, database


async def _page(http: httpx.AsyncClient, asked: Sequence[str], pids: list[int]) -> dict[str, float]:
    walls: list[float] = []
    answers: list[httpx.Response] = []
    cpu_before_s = cpu_s(pids)
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        answers = [await http.get(path) for path in asked]
        walls.append((time.perf_counter() - began_s) * 1e3)
    for answer in answers:
        if answer.status_code != 200:
            print(f"{answer.url}: {answer.status_code} {answer.text[:200]}", flush=True)
    walls.sort()
    return {
        "requests": len(asked),
        "wall_p50_ms": round(walls[_ROUNDS // 2], 1),
        "wall_max_ms": round(walls[-1], 1),
        "cpu_ms": round((cpu_s(pids) - cpu_before_s) * 1e3 / _ROUNDS, 1),
        "answer_kb": round(sum(len(it.content) for it in answers) / 1e3, 1),
        "failed": sum(it.status_code != 200 for it in answers),
    }


async def _live(url: str, child: ChildProcess, database: asyncpg.Connection) -> dict[str, float]:
    """Return the control plane's CPU time for 20 viewers of the feed, in percent of a core."""
    events = 0

    async def change() -> None:
        number = 0
        while True:
            number += 1
            for statement in _ALIVE:
                await database.execute(statement)
            await database.execute(_REPORT, number)
            await asyncio.sleep(_LOOK_S / 4)

    async def view(http: httpx.AsyncClient) -> None:
        nonlocal events
        async with http.stream("GET", "/console/data/live") as answer:
            async for line in answer.aiter_lines():
                events += line.startswith("event:")

    async def measured(viewers: int) -> tuple[float, int]:
        limits = httpx.Limits(max_connections=100)
        headers = {"authorization": f"Bearer {_KEY}"}
        async with (
            httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(change())]
            tasks += [group.create_task(view(http)) for _ in range(viewers)]
            await asyncio.sleep(5)
            before_s, seen = cpu_s([child.pid]), events
            await asyncio.sleep(_LIVE_S)
            spent_s, told = cpu_s([child.pid]) - before_s, events - seen
            for task in tasks:
                task.cancel()
        return spent_s / _LIVE_S * 100, told

    # Discards the process's first minute, which costs more CPU time than later minutes.
    await measured(0)
    without, _ = await measured(0)
    one, _ = await measured(1)
    twenty, told = await measured(_VIEWERS)
    return {
        "viewers": _VIEWERS,
        "events_per_viewer": round(told / _VIEWERS),
        "core_percent_without": round(without, 2),
        "core_percent_of_one": round(one - without, 2),
        "core_percent_of_twenty": round(twenty - without, 2),
    }


async def _run(home: Path, requests: int) -> dict[str, Any]:
    port = free_port()
    spec = tracestore_spec(port, home / "traces", home / "log", {"PATH": os.environ["PATH"]})
    traces = await ChildProcess.start(spec)
    store = Store(StoreSettings(clickhouse_url=f"http://127.0.0.1:{port}"))
    try:
        await traces.wait_ready(30)
        await store.prepare()
        to_ms = int(time.time() * 1000) // _MINUTE_MS * _MINUTE_MS
        definition = (await store.query(f"SHOW CREATE TABLE {MARKS_VIEW}", {}))[0]["statement"]
        await store.write(f"DROP VIEW {MARKS_VIEW}", {})
        await fill_month(store, requests, to_ms, _WITH_IDS)
        await store.write(definition, {})
        print("filled", flush=True)
        await roll_month(store, to_ms)
        metrics = TelemetryMetrics()
        sums = [DaySums(store, metrics, it) for it in (USAGE, USAGE_BY_HOUR, COST_SUMS)]
        while not all([await it.step() for it in sums]):  # a step ends after some minutes
            pass
        print("rolled up", flush=True)
        [some] = await store.query(_SOME_ID, {})
        database_home = home / "database"
        database_home.mkdir(mode=0o711)
        async with (
            _telemetry(store, home) as telemetry_url,
            _control_plane(database_home, telemetry_url) as (url, child, database),
            httpx.AsyncClient(
                base_url=url, headers={"authorization": f"Bearer {_KEY}"}, timeout=60
            ) as http,
        ):
            live = await _live(url, child, database)
            print(live, flush=True)
            pids = [traces.pid, child.pid, os.getpid()]
            found: dict[str, Any] = {}
            for name, asked in pages(some["request_id"]).items():
                found[name] = await _page(http, asked, pids)
                print(name, found[name], flush=True)
            return {"live": live, "pages": found}
    finally:
        await store.close()
        await traces.stop()


def main() -> None:
    """Measure, and write `benchmarks/results/console.json` if there are 50 million requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=_REQUESTS)
    requests = parser.parse_args().requests
    home = Path(tempfile.mkdtemp(prefix="sluice-console-", dir="/tmp"))
    home.chmod(0o711)
    try:
        results = asyncio.run(_run(home, requests))
    finally:
        shutil.rmtree(home)
    if requests != _REQUESTS:  # too few requests for the goal, so no result file
        print(json.dumps(results, indent=2))
        return
    assert __doc__ is not None
    operation = " ".join(__doc__.split("\n\n", 1)[1].split())
    parameters = {"requests": requests, "rounds": _ROUNDS}
    print(write_result("console", operation, {"parameters": parameters, **results}).read_text())


if __name__ == "__main__":
    main()
