"""Measures the trace store's queries of a tenant's month among 50 million requests.

One operation is one query through the service's own client, on the local trace store. The store has
50 million requests of 2,000 tenants in the last 30 days. The largest tenant has 8 % of them, the
median tenant 0.01 %, and 1 % were written twice. Queries of a month's usage, by day and by hour,
are measured before and after the rollups are computed. Without rollups a query sums all events, and
with rollups only those of the last ten minutes. Two further queries never use rollups. One is the
evidence of a rollout that has half of the requests of the last hour, the other the fleet's costs of
a day. The store itself generates the rows, half a day per statement, in `fill_s` seconds. The
service's own loop computes the rollups of hours, in `rollup_s` seconds. Only the latest rollups of
minutes are computed, because a month's usage reads no earlier ones.

Not measured: HTTP of the service, a store under writes, a cold page cache, and merges. For merges
the benchmark waits a minute at most. The figures p50 and p99 are in milliseconds, and are valid
only on an otherwise idle machine. `store_cpu_ms` is the CPU time of the store per query, and is
valid on a busy machine too. `refused` counts queries that reach the service's limit of 25 s. It
must be 0 for a month with rollups. The benchmark needs 4 GiB of disk.
Run: `python -m benchmarks.micro.trace_month [--requests N]`.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

from benchmarks.results import write_result
from cli.stack.tracestore import tracestore_spec
from sluice.process import ChildProcess, free_port
from sluice.procfs import cpu_s
from telemetry.costs.query import measured
from telemetry.evidence import complete_windows, rollout_windows
from telemetry.metrics import TelemetryMetrics
from telemetry.rollups import DAY_MS, HOUR_MS
from telemetry.rollups_worker import Rollups
from telemetry.settings import StoreSettings
from telemetry.store import STORE_ERRORS, Store
from telemetry.usage import Granularity, UsageQuery, usage

_REQUESTS = 50_000_000
_DAYS = 30
_TENANTS = 2_000
_ROUNDS = 100
_WINDOW_MS = 10_000
_MERGES_S = 60
_ROWS_AT_ONCE = 300_000  # rows per insert, which then lasts only seconds
MARKS_VIEW = "rollup_marks_of_requests"
# A tenant's number is the cube of a random number, so that few tenants have most requests.
FILL = """
INSERT INTO requests (event_id, received_at, ingested_at, tenant_id, key_id, session_hash, model,
    release, pool_id, replica_id, rollout_id, arm, outcome, status, choices, endpoint,
    prompt_tokens, cached_tokens, output_tokens, ttft_us, total_us)
SELECT
    concat('evt_', leftPad(hex(number), 12, '0')),
    fromUnixTimestamp64Milli(
        {from_ms:Int64} + toInt64(intDiv(number * {length_ms:Int64}, {requests:Int64})), 'UTC'
    ) AS at,
    at + toIntervalSecond(20),
    concat('ten_', toString(toUInt16(
        {tenants:UInt16} * pow(cityHash64(number, 1) / 18446744073709551616, 3)
    ))),
    concat('key_', toString(cityHash64(number, 2) % 2)),
    cityHash64(number, 3) % 100000 + 1,
    concat('model-', toString(cityHash64(number, 4) % 2)),
    'v1', 'pool', concat('replica-', toString(number % 8)),
    if({is_last:Bool} AND number % 2 = 0, 'rollout', ''),
    if({is_last:Bool} AND number % 2 = 0, if(number % 20 = 0, 2, 1), 0),
    'stop', 200, 1, '/v1/chat/completions',
    cityHash64(number, 5) % 4000, cityHash64(number, 5) % 1000, cityHash64(number, 6) % 1000,
    200000 + cityHash64(number, 7) % 1000000, 2000000 + cityHash64(number, 7) % 9000000
FROM numbers({first:UInt64}, {count:UInt64})
SETTINGS max_insert_threads = 2, max_partitions_per_insert_block = 0, optimize_on_insert = 0
"""
# The statement of the migration's view, restricted to hours.
_MARK = """
INSERT INTO rollup_marks (marked_at, tenant_id, minute)
SELECT DISTINCT
    fromUnixTimestamp64Milli({now_ms:Int64} - toInt64(cityHash64(tenant_id) % 1000), 'UTC'),
    tenant_id, toStartOfHour(received_at)
FROM requests
WHERE received_at >= fromUnixTimestamp64Milli({from_ms:Int64}, 'UTC')
    AND received_at < fromUnixTimestamp64Milli({to_ms:Int64}, 'UTC')
"""
_BEGIN = """
INSERT INTO rollup_progress (name, until)
SELECT name, fromUnixTimestamp64Milli(until, 'UTC') FROM (
    SELECT arrayJoin([('minutes', {now_ms:Int64}), ('hours', {now_ms:Int64} - 1001)]) AS it,
        it.1 AS name, it.2 AS until
)
"""
_UNTIL = """
SELECT toUnixTimestamp64Milli(max(until)) AS until_ms FROM rollup_progress WHERE name = 'hours'
"""
_MERGES = "SELECT count() AS merges FROM system.merges"
_PARTS = """
SELECT sum(bytes_on_disk) / 1073741824 AS gib, sumIf(rows, table = 'requests') AS requests,
    sumIf(rows, table = 'usage_minutes') AS minutes, sumIf(rows, table = 'usage_hours') AS hours,
    countIf(table = 'requests') AS request_parts
FROM system.parts WHERE active AND database = currentDatabase()
"""


async def fill_month(store: Store, requests: int, to_ms: int, statement: str = FILL) -> None:
    """Write 30 days in slices, with the last hour separately, then some of the first rows again."""
    hours = _DAYS * 24
    length_ms = hours * HOUR_MS
    edges = [requests * hour // hours for hour in [*range(0, hours - 1, 12), hours - 1, hours]]
    again = requests // 100

    async def write(first: int, end: int) -> None:
        parameters = {
            "from_ms": to_ms - length_ms,
            "length_ms": length_ms,
            "requests": requests,
            "tenants": _TENANTS,
            "is_last": first >= edges[-2],
            "first": first,
            "count": end - first,
        }
        await store.write(statement, parameters)

    for first, end in [*pairwise(edges), (requests // 2, requests // 2 + again)]:
        for begin in range(first, end, _ROWS_AT_ONCE):
            await write(begin, min(begin + _ROWS_AT_ONCE, end))


async def roll_month(store: Store, to_ms: int) -> None:
    now_ms = int(time.time() * 1000)
    for day in range(_DAYS):
        end_ms = to_ms - day * DAY_MS
        span = {"from_ms": end_ms - DAY_MS, "to_ms": end_ms}
        await store.write(_MARK, {"now_ms": now_ms, **span})
    await store.write(_BEGIN, {"now_ms": now_ms})
    rollups = Rollups(store, TelemetryMetrics(), settle_ms=1)
    until_ms = 0
    while until_ms < now_ms:  # a step ends after some minutes, complete or not
        try:
            await rollups.step()
            [row] = await store.query(_UNTIL, {})
            until_ms = row["until_ms"]
        except STORE_ERRORS as error:  # the next step has fewer rows, as in the service
            print(f"again after {error!r:.100}", flush=True)


async def _timed(
    pid: int, ask: Callable[[int], Awaitable[object]], rounds: int
) -> dict[str, float]:
    spent_ms: list[float] = []
    refused = 0
    cpu_before_s = cpu_s([pid])
    for number in range(rounds):
        started = time.perf_counter()
        try:
            await ask(number)
        except STORE_ERRORS:  # the query reached the limit of 25 s
            refused += 1
        spent_ms.append((time.perf_counter() - started) * 1e3)
    store_cpu_s = cpu_s([pid]) - cpu_before_s
    spent_ms.sort()
    return {
        "p50_ms": round(spent_ms[rounds // 2], 1),
        "p99_ms": round(spent_ms[rounds * 99 // 100], 1),
        "store_cpu_ms": round(store_cpu_s * 1e3 / rounds, 1),
        "refused": refused,
    }


async def _months(store: Store, pid: int, to_ms: int, rounds: int) -> dict[str, dict[str, float]]:
    from_ms = to_ms - _DAYS * DAY_MS

    async def ask(tenant: int, granularity: Granularity) -> None:
        rows = await usage(
            store, UsageQuery(from_ms, to_ms, granularity, tenant_id=f"ten_{tenant}")
        )
        assert rows, tenant

    found: dict[str, dict[str, float]] = {}
    for granularity in Granularity:
        found[f"largest_tenants_month_by_{granularity}"] = await _timed(
            pid, lambda _, it=granularity: ask(0, it), rounds
        )
        found[f"any_tenants_month_by_{granularity}"] = await _timed(
            pid, lambda number, it=granularity: ask(number * 19 % _TENANTS, it), rounds
        )
    return found


async def _fleet(store: Store, pid: int, to_ms: int) -> dict[str, dict[str, float]]:
    ten = complete_windows(to_ms - 10 * _WINDOW_MS, to_ms, _WINDOW_MS)
    hour = complete_windows(to_ms - HOUR_MS, to_ms, _WINDOW_MS)
    day = (to_ms - DAY_MS, to_ms)
    everybody = UsageQuery(to_ms - 7 * DAY_MS, to_ms, Granularity.DAY, key_id="key_1")
    return {
        "ten_windows": await _timed(pid, lambda _: rollout_windows(store, "rollout", ten), 40),
        "an_hour_of_windows": await _timed(
            pid, lambda _: rollout_windows(store, "rollout", hour), 10
        ),
        "fleets_costs_of_a_day": await _timed(pid, lambda _: measured(store, day), 3),
        "one_keys_week_by_day_of_everybody": await _timed(
            pid, lambda _: usage(store, everybody), 3
        ),
    }


async def _measure(store: Store, pid: int, requests: int) -> dict[str, object]:
    to_ms = int(time.time() * 1000) // HOUR_MS * HOUR_MS
    await store.prepare()
    definition = (await store.query(f"SHOW CREATE TABLE {MARKS_VIEW}", {}))[0]["statement"]
    await store.write(f"DROP VIEW {MARKS_VIEW}", {})
    started, spent_s = time.perf_counter(), cpu_s([pid])
    await fill_month(store, requests, to_ms)
    filled_s, filled_cpu_s = time.perf_counter() - started, cpu_s([pid]) - spent_s
    print(f"filled in {filled_s:.0f} s, {filled_cpu_s:.0f} s of CPU", flush=True)
    before = await _months(store, pid, to_ms, 3)
    await store.write(definition, {})
    started, spent_s = time.perf_counter(), cpu_s([pid])
    await roll_month(store, to_ms)
    rolled_s, rolled_cpu_s = time.perf_counter() - started, cpu_s([pid]) - spent_s
    print(f"rolled up in {rolled_s:.0f} s, {rolled_cpu_s:.0f} s of CPU", flush=True)
    # Events after the rollups: requests of the last ten minutes are written again.
    first = requests - requests * 10 // (_DAYS * 24 * 60)
    fresh = {"from_ms": to_ms - _DAYS * DAY_MS, "length_ms": _DAYS * DAY_MS, "requests": requests}
    fresh |= {"tenants": _TENANTS, "is_last": True, "first": first, "count": requests - first}
    await store.write(FILL, fresh)
    for _ in range(_MERGES_S):
        if not (await store.query(_MERGES, {}))[0]["merges"]:
            break
        await asyncio.sleep(1)
    [parts] = await store.query(_PARTS, {})
    return {
        "fill_s": round(filled_s),
        "fill_cpu_s": round(filled_cpu_s),
        "rollup_s": round(rolled_s),
        "rollup_cpu_s": round(rolled_cpu_s),
        "disk_gib": round(parts["gib"], 1),
        "rows": {name: parts[name] for name in ("requests", "minutes", "hours", "request_parts")},
        "from_events": before,
        "with_rollups": await _months(store, pid, to_ms, _ROUNDS),
        "fleet": await _fleet(store, pid, to_ms),
    }


async def _run(home: Path, requests: int) -> dict[str, object]:
    port = free_port()
    spec = tracestore_spec(port, home / "traces", home / "log", {"PATH": os.environ["PATH"]})
    child = await ChildProcess.start(spec)
    store = Store(StoreSettings(clickhouse_url=f"http://127.0.0.1:{port}"))
    try:
        await child.wait_ready(30)
        return await _measure(store, child.pid, requests)
    finally:
        await store.close()
        await child.stop()


def main() -> None:
    """Run all cases, and write `benchmarks/results/trace_month.json` for 50 million requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=_REQUESTS)
    requests = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(_run(Path(folder), requests))
    if requests != _REQUESTS:  # too few requests for the goal, so no result file
        print(json.dumps(results, indent=2))
        return
    parameters = {"requests": requests, "tenants": _TENANTS, "days": _DAYS, "rounds": _ROUNDS}
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    path = write_result("trace_month", operation, {"parameters": parameters, **results})
    print(path.read_text())


if __name__ == "__main__":
    main()
