"""Measures how fast one control plane on a real PostgreSQL sends changes to hundreds of watchers.

One operation is a change of one API key, from the write to the database until the last watcher has
received the message. Other figures are the time of a new watcher's first snapshot, read by the
gateway's code, and the first message to a watcher that reconnects. The memory of the control plane
is measured with watchers, after a storm of changes, and while watchers do not read their open
streams. All processes share the cores of one machine. Not measured: a network, and the readers'
work on a message, because watchers only record its arrival.
Run: `python -m benchmarks.load.watch`.
"""

import argparse
import asyncio
import gc
import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from benchmarks.load.watchers import Watchers
from benchmarks.results import write_result
from cli.stack import postgres
from control_plane.migrate import migrate
from sluice import shared_secret
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

_LOAD_S = 120.0
_STORM_S = 300.0
_MIB = 1024 * 1024
_TABLES = ("tiers", "bases", "pools", "tenants", "api_keys", "models")
_FILL = (
    "INSERT INTO tiers (id, priority) SELECT 'tier-' || n, n FROM generate_series(1, 4) n",
    "INSERT INTO bases (digest, name) VALUES ('base', 'base')",
    "INSERT INTO pools (id, base_digest, engine) VALUES ('pool', 'base', 'python')",
    "INSERT INTO tenants (id, name, tier_id, cache_salt, weight) SELECT 'tenant-' || n, "
    "'Tenant ' || n, 'tier-' || n % 4 + 1, substr(sha256(n::text::bytea), 1, 16), 1 "
    "FROM generate_series(0, {tenants} - 1) n",
    "INSERT INTO api_keys (id, tenant_id, secret_sha256) SELECT 'key-' || n, "
    "'tenant-' || n % {tenants}, sha256(n::text::bytea) FROM generate_series(0, {keys} - 1) n",
    "INSERT INTO models (id, base_digest, adapter_digest, release, created_at_unix_s, pool_id) "
    "SELECT 'model-' || n, 'base', encode(sha256(n::text::bytea), 'hex'), '1', 1, 'pool' "
    "FROM generate_series(0, {models} - 1) n",
)


@dataclass(frozen=True, slots=True)
class WatchSite:
    """A control plane that has read a large database, which took `load_s` seconds."""

    address: str
    process: psutil.Process
    database: asyncpg.Connection
    load_s: float

    def rss_mib(self) -> float:
        """Present resident memory of the control plane, in MiB."""
        return round(self.process.memory_info().rss / _MIB, 1)

    def cpu_s(self) -> float:
        """CPU time of the control plane since its start, in seconds."""
        times = self.process.cpu_times()
        return times.user + times.system

    async def change(self, number: int) -> tuple[int, float]:
        """Change a key. Returns the new version, and the time before the change."""
        began_s = time.monotonic()
        await self.database.execute(
            "UPDATE api_keys SET rpm = rpm + 1 WHERE id = $1", f"key-{number}"
        )
        return await self.version(), began_s

    async def version(self) -> int:
        """Return the newest version in the database."""
        return int(await self.database.fetchval("SELECT max(version) FROM changes") or 0)


async def _fill(database: asyncpg.Connection, counts: dict[str, int]) -> None:
    for table in _TABLES:
        await database.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
    for statement in _FILL:
        await database.execute(statement.format(**counts))
    for table in _TABLES:
        await database.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")
    await database.execute("ANALYZE")
    await database.execute("UPDATE tiers SET rpm = 1")


@asynccontextmanager
async def _running_site(counts: dict[str, int]) -> AsyncGenerator[WatchSite]:
    home = Path(tempfile.mkdtemp(prefix="sluice-watch-", dir="/tmp"))
    home.chmod(0o711)
    started: list[ChildProcess] = []
    try:
        await postgres.prepare_postgres(home, fsync=False)
        spec = postgres.postgres_spec(home, 5432, log_file=home / "postgres.log", fsync=False)
        started.append(await ChildProcess.start(spec))
        await started[-1].wait_ready(30)
        url = postgres.database_url(home, 5432)
        await migrate(url)
        sockets = str(postgres.locate(home).sockets)
        database = await asyncpg.connect(
            user="postgres", database=postgres.DATABASE, host=sockets, port=5432
        )
        await _fill(database, counts)
        spec, address = _control_plane(home, url)
        began_s = time.monotonic()
        started.append(await ChildProcess.start(spec))
        await started[-1].wait_ready(30)
        watcher = ControlWatcher(address, wire.ROLE_OPERATOR, "first")
        await _synced(watcher)
        load_s = time.monotonic() - began_s
        yield WatchSite(address, psutil.Process(started[-1].pid), database, round(load_s, 2))
        await database.close()
    finally:
        for child in reversed(started):
            await child.stop()
        shutil.rmtree(home)


def _control_plane(home: Path, url: str) -> tuple[ProcessSpec, str]:
    grpc_port, http_port = free_port(), free_port()
    settings = {
        "DATABASE_URL": url,
        "GRPC_ADDRESS": f"127.0.0.1:{grpc_port}",
        "HTTP_ADDRESS": f"127.0.0.1:{http_port}",
        "ADMIN_KEY_SHA256": hashlib.sha256(b"nobody").hexdigest(),
    }
    spec = ProcessSpec(
        name="control-plane",
        command=[sys.executable, "-m", "control_plane"],
        env={"PATH": "/usr/bin:/bin", **shared_secret.environment()}
        | {f"CONTROL_PLANE__{key}": value for key, value in settings.items()},
        log_file=home / "control-plane.log",
        ready=lambda: port_answers("127.0.0.1", grpc_port),
    )
    return spec, f"127.0.0.1:{grpc_port}"


async def _synced(watcher: ControlWatcher) -> None:
    """Run a watcher until it has a state."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        found = await watcher.wait_synced(_LOAD_S)
        running.cancel()
    if not found:
        raise RuntimeError(f"no state within {_LOAD_S:g} s")


async def _longest_gap_s() -> float:
    """Return, on cancellation, the longest CPU time between two iterations of the event loop."""
    longest_s, last_s = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
    except asyncio.CancelledError:
        return longest_s


async def _first_snapshots(site: WatchSite, rounds: int) -> dict[str, Any]:
    """Time the first snapshots of new watchers, and their longest blocking of this event loop."""
    seconds: list[float] = []
    gaps: list[float] = []
    for number in range(rounds):
        await site.change(number)
        watcher = ControlWatcher(site.address, wire.ROLE_GATEWAY, f"new-{number}")
        async with asyncio.TaskGroup() as tasks:
            gap = tasks.create_task(_longest_gap_s())
            began_s = time.monotonic()
            await _synced(watcher)
            seconds.append(time.monotonic() - began_s)
            gap.cancel()
        gaps.append(gap.result())
    return {
        "first_snapshot_s": {"median": _at(seconds, 0.5), "max": _at(seconds, 1.0)},
        "reader_loop_held_cpu_ms": {"median": _at(gaps, 0.5, 1e3), "max": _at(gaps, 1.0, 1e3)},
    }


async def _changes(site: WatchSite, watchers: Watchers, count: int) -> dict[str, Any]:
    """Time single changes, from the write to the arrival at each watcher and at the last one."""
    each: list[float] = []
    last: list[float] = []
    cpu_s = site.cpu_s()
    for number in range(count):
        version, began_s = await site.change(number)
        arrivals = await watchers.arrivals(version)
        each += [at_s - began_s for at_s in arrivals]
        last.append(max(arrivals) - began_s)
    return {
        "change_at_a_watcher_ms": {f"p{p}": _at(each, p / 100, 1e3) for p in (50, 99)},
        "change_at_all_ms": {f"p{p}": _at(last, p / 100, 1e3) for p in (50, 99)},
        "server_cpu_ms_per_change": round((site.cpu_s() - cpu_s) / count * 1e3, 1),
    }


async def _storm(site: WatchSite, watchers: Watchers, count: int) -> dict[str, Any]:
    """Change rows as fast as possible, and time until all watchers have received all changes."""
    cpu_s, began_s = site.cpu_s(), time.monotonic()
    for number in range(count):
        await site.database.execute(
            "UPDATE api_keys SET rpm = rpm + 1 WHERE id = $1", f"key-{number}"
        )
    made_s = time.monotonic()
    async with asyncio.timeout(_STORM_S):
        arrivals = await watchers.arrivals(await site.version())
    return {
        "storm_changes": count,
        "storm_made_s": round(made_s - began_s, 2),
        "storm_last_change_at_all_ms": round((max(arrivals) - made_s) * 1e3, 1),
        "storm_server_cpu_s": round(site.cpu_s() - cpu_s, 2),
    }


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    counts = {"tenants": options.tenants, "keys": options.keys, "models": options.models}
    async with _running_site(counts) as site:
        figures: dict[str, Any] = {**counts, "watchers": options.watchers, "load_s": site.load_s}
        figures["rss_mib"] = memory = {"loaded": site.rss_mib()}
        figures |= await _first_snapshots(site, options.snapshots)
        memory["snapshots"] = site.rss_mib()
        async with Watchers.running(site.address, options.watchers, await site.version()) as many:
            memory["watchers"] = site.rss_mib()
            figures |= await _changes(site, many, options.changes)
            figures["came_back_messages"] = await many.comes_back(await site.version())
            memory["changes"] = site.rss_mib()
            figures |= await _storm(site, many, options.storm)
            memory["storm"] = site.rss_mib()
            async with Watchers.running(site.address, options.slow, 0, is_reading=False):
                began_s = time.monotonic()
                highest = 0.0
                while time.monotonic() - began_s < options.slow_s:
                    await site.change(0)
                    highest = max(highest, site.rss_mib())
                    await asyncio.sleep(0.1)
                memory["not_reading_highest"] = highest
            await asyncio.sleep(2)
            memory["not_reading_gone"] = site.rss_mib()
        return figures


def _at(values: list[float], share: float, scale: float = 1.0) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * scale, 3)


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load.watch")
    for name, default in (
        *(("models", 10_000), ("tenants", 50_000), ("keys", 200_000), ("watchers", 500)),
        *(("snapshots", 5), ("changes", 100), ("storm", 5000), ("slow", 40), ("slow-s", 8)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-result", action="store_true", help="print only")
    options = parser.parse_args()
    gc.freeze()  # as gateways and routers do
    gc.set_threshold(10_000, 20, 100)
    figures = asyncio.run(_measure(options))
    print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    if not options.no_result:
        print(write_result("watch", __doc__ or "", figures))


if __name__ == "__main__":
    main()
