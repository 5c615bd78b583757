"""Measures the trace store's queries for rollouts and for the ledger.

One operation is one query through the service's own client, on the local trace store. The store has
300,000 requests of the last month, written in the order of their time. The last hour has 100,000
requests, half of them in a rollout. The queries for the rollout are ten windows, and one whole
hour. The queries for the ledger are a tenant's day by the hour and month by the day, for one of a
hundred tenants. The figures p50 and p99 are in milliseconds, and are valid only on an otherwise
idle machine. `store_cpu_ms` is the CPU time of the store per query, and is valid on a busy machine
too. Not measured: HTTP of the service, a store under writes. Run:
`python -m benchmarks.micro.trace_queries`.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

from benchmarks.results import write_result
from cli.stack.tracestore import tracestore_spec
from sluice.process import ChildProcess, free_port
from sluice.procfs import cpu_s
from sluice.wire.telemetry.v1.telemetry_pb2 import (
    ARM_CANARY,
    ARM_CONTROL,
    ARM_UNSPECIFIED,
    RequestEvent,
)
from telemetry.evidence import complete_windows, rollout_windows
from telemetry.rows import RowBatch
from telemetry.settings import StoreSettings
from telemetry.store import Store
from telemetry.usage import Granularity, UsageQuery, usage

_EVENTS = 300_000
_RECENT = 100_000
_BATCH = 20_000
_TENANTS = 100
_HOUR_MS = 3_600_000
_ROUNDS = 40
_WINDOW_MS = 10_000
_SEED = 1


def some_event(random: Random, ago_ms: int, now_ms: int) -> RequestEvent:
    """Return an event of a session of about eight turns."""
    is_recent = ago_ms < _HOUR_MS
    has_rollout = is_recent and random.random() < 0.5
    arm = ARM_CANARY if random.random() < 0.1 else ARM_CONTROL
    total_us = random.randrange(200_000, 20_000_000)
    return RequestEvent(
        schema_version=1,
        event_id=f"evt_{random.getrandbits(128):032x}",
        received_at_unix_ms=now_ms - ago_ms,
        request_id=f"req_{random.getrandbits(128):032x}",
        tenant_id=f"ten_{random.randrange(_TENANTS)}",
        key_id=f"key_{random.randrange(3)}",
        session_hash=random.randrange(1, _EVENTS // 8),
        model=f"model-{random.randrange(3)}",
        replica_id="replica-1",
        rollout_id="rollout" if has_rollout else "",
        arm=arm if has_rollout else ARM_UNSPECIFIED,
        prompt_tokens=random.randrange(4_000),
        output_tokens=random.randrange(1_000),
        ttft_us=total_us // 4,
        total_us=total_us,
        choices=1,
        outcome="stop",
        status=200,
    )


async def _fill(store: Store, now_ms: int) -> None:
    random = Random(_SEED)
    agos_ms = [random.randrange(_HOUR_MS) for _ in range(_RECENT)]
    agos_ms += [random.randrange(_HOUR_MS, 720 * _HOUR_MS) for _ in range(_EVENTS - _RECENT)]
    agos_ms.sort(reverse=True)
    for first in range(0, _EVENTS, _BATCH):
        batch = agos_ms[first : first + _BATCH]
        await store.insert(RowBatch([some_event(random, ago_ms, now_ms) for ago_ms in batch]))


async def _timed(pid: int, ask: Callable[[], Awaitable[object]]) -> dict[str, float]:
    spent_ms: list[float] = []
    cpu_before_s = cpu_s([pid])
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        await ask()
        spent_ms.append((time.perf_counter() - started) * 1e3)
    store_cpu_s = cpu_s([pid]) - cpu_before_s
    spent_ms.sort()
    return {
        "p50_ms": round(spent_ms[_ROUNDS // 2], 1),
        "p99_ms": round(spent_ms[_ROUNDS * 99 // 100], 1),
        "store_cpu_ms": round(store_cpu_s * 1e3 / _ROUNDS, 1),
    }


async def _measure(store: Store, pid: int) -> dict[str, dict[str, float]]:
    now_ms = int(time.time() * 1000) // _HOUR_MS * _HOUR_MS
    await _fill(store, now_ms)
    ten = complete_windows(now_ms - 10 * _WINDOW_MS, now_ms, _WINDOW_MS)
    hour = complete_windows(now_ms - _HOUR_MS, now_ms, _WINDOW_MS)
    day = UsageQuery(now_ms - 24 * _HOUR_MS, now_ms, tenant_id="ten_7")
    month = UsageQuery(now_ms - 720 * _HOUR_MS, now_ms, Granularity.DAY, tenant_id="ten_7")
    return {
        "ten_windows": await _timed(pid, lambda: rollout_windows(store, "rollout", ten)),
        "an_hour_of_windows": await _timed(pid, lambda: rollout_windows(store, "rollout", hour)),
        "tenants_day_by_hour": await _timed(pid, lambda: usage(store, day)),
        "tenants_month_by_day": await _timed(pid, lambda: usage(store, month)),
    }


async def _run(home: Path) -> dict[str, dict[str, float]]:
    port = free_port()
    spec = tracestore_spec(port, home / "traces", home / "log", {"PATH": os.environ["PATH"]})
    child = await ChildProcess.start(spec)
    store = Store(StoreSettings(clickhouse_url=f"http://127.0.0.1:{port}"))
    try:
        await child.wait_ready(30)
        return await _measure(store, child.pid)
    finally:
        await store.close()
        await child.stop()


def main() -> None:
    """Run all cases and write `benchmarks/results/trace_queries.json`."""
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(_run(Path(folder)))
    parameters = {"events": _EVENTS, "recent": _RECENT, "tenants": _TENANTS, "rounds": _ROUNDS}
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    path = write_result("trace_queries", operation, {"parameters": parameters, **results})
    print(path.read_text())


if __name__ == "__main__":
    main()
