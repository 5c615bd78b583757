"""Measures the way of events from producers to the trace store, at a rate and after an outage.

One operation is one event (about 490 bytes), from its serialisation in a producer process until the
trace store has its row. Producers, the local broker, `python -m telemetry` and the local trace
store run on the same cores. `steady` emits events at a rate for some seconds, and samples how many
emitted events are not yet in the store (under way). `outage` begins with a killed broker. The
producers emit the events of ten minutes as fast as possible, so these are spooled to disk. Then the
benchmark starts the broker, and emits further events at the rate. It measures the time until the
spools are empty and at most a second's events are under way. At the end every event is read from
the store by its id. Not measured: building an event from a request, a network, a Kafka that writes
to disk. The figures to read are `lost`, `under_way_max` and the CPU time per event of each process,
which is insensitive to noise.
Run: `python -m benchmarks.load.telemetry_pipeline [steady [RATE [SECONDS]]] [outage [RATE]]`.
"""

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import clickhouse_connect
import httpx

from benchmarks.micro.event_emit import filled_event
from benchmarks.results import write_result
from cli.stack.broker import broker_spec
from cli.stack.tracestore import tracestore_spec
from sluice import shared_secret
from sluice.events import REQUESTS_TOPIC, EventProducer
from sluice.logs import configure_logs
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.procfs import cpu_s, memory_bytes
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

_RATE = 20_000
_STEADY_S = 60.0
_OUTAGE_RATE = 2_000
_OUTAGE_S = 600.0
_PRODUCERS = 2
_TICK_S = 0.005
_QUEUED_MAX = 50_000  # waiting events at which a burst pauses: half of a producer's memory bound
_DRAIN_S = 300.0
_SAMPLE_S = 1.0
_DATABASE = "sluice"


def _events(number: int) -> list[RequestEvent]:
    """Return events of some hundred keys and models. The producer sets their ids later."""
    draw = random.Random(number)
    events: list[RequestEvent] = []
    for _ in range(500):
        event = filled_event()
        event.tenant_id = f"ten_{draw.randrange(100):026}"
        event.key_id = f"key_{draw.randrange(300):026}"
        event.model = event.requested_model = f"model-{draw.randrange(8)}"
        event.replica_id = f"replica-{draw.randrange(64):05}"
        event.session_hash = draw.getrandbits(64)
        event.prompt_tokens = draw.randrange(8_000)
        event.output_tokens = draw.randrange(1_000)
        event.ttft_us = draw.randrange(1_000_000)
        event.total_us = draw.randrange(20_000_000)
        events.append(event)
    return events


def _produce(address: str, spool: Path, number: int, burst: int, rate: float) -> None:
    """Emit `burst` events, then events at `rate` until stdin ends. Prints counters regularly."""
    configure_logs("producer")  # to stderr
    ending = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ending.set()), daemon=True).start()
    producer = EventProducer(
        address, REQUESTS_TOPIC, spool_directory=spool, spool_max_bytes=4 << 30, broker_wait_s=2.0
    )
    events = _events(number)
    draw = random.Random(number)
    emitted, began_s, said_s = 0, time.monotonic(), 0.0
    rated_from_s = 0.0
    while not ending.is_set():
        now_s = time.monotonic()
        if emitted < burst:
            due = min(burst - emitted, _QUEUED_MAX - producer.stats.queued)
        else:
            rated_from_s = rated_from_s or now_s
            due = int((now_s - rated_from_s) * rate) - (emitted - burst)
        for _ in range(max(0, due)):
            event = events[emitted % len(events)]
            event.event_id = f"evt_{number}_{emitted:020}"
            event.received_at_unix_ms = int(time.time() * 1000)
            event.request_id = f"req_{draw.getrandbits(128):032x}"
            event.trace_id = f"{draw.getrandbits(128):032x}"
            producer.emit(event.SerializeToString())
            emitted += 1
        if now_s - said_s > 0.25:
            _print_progress(producer, emitted, began_s, is_spooled=emitted >= burst)
            said_s = now_s
        time.sleep(_TICK_S)
    producer.flush(_DRAIN_S)
    _print_progress(producer, emitted, began_s, is_spooled=True)
    producer.close(0.1)


def _print_progress(
    producer: EventProducer, emitted: int, began_s: float, *, is_spooled: bool
) -> None:
    stats = producer.stats
    is_burst_over = is_spooled and stats.queued < 1000
    line = {
        "emitted": emitted,
        "dropped": stats.dropped + stats.damaged,
        "spooled": stats.spooled,
        "spool_bytes": stats.spool_bytes,
        "is_burst_over": is_burst_over,
        "cpu_s": time.process_time(),
        "seconds": time.monotonic() - began_s,
    }
    print(json.dumps(line), flush=True)


@dataclass
class _Producers:
    """The producer processes, each with its last printed counters."""

    children: list[asyncio.subprocess.Process]
    said: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])

    def total(self, name: str) -> float:
        """Return the sum of one counter over all processes."""
        return sum(one[name] for one in self.said.values())

    async def read(self, number: int) -> None:
        """Read and keep the counters that a process prints, until the process ends."""
        stdout = self.children[number].stdout
        assert stdout is not None
        while line := await stdout.readline():
            self.said[number] = json.loads(line)

    async def end(self) -> None:
        """Tell all processes to stop emitting. They flush their events and end."""
        for child in self.children:
            assert child.stdin is not None
            child.stdin.close()
        async with asyncio.timeout(_DRAIN_S):
            await asyncio.gather(*(child.wait() for child in self.children))


@dataclass
class PipelineSite:
    """The processes that events of producers pass: broker, telemetry and trace store."""

    home: Path
    broker: ChildProcess
    broker_port: int
    telemetry: ChildProcess
    telemetry_port: int
    store: ChildProcess
    store_port: int

    @property
    def pids(self) -> dict[str, int]:
        """Pids of broker, telemetry and trace store, by name."""
        return {
            "broker": self.broker.pid,
            "telemetry": self.telemetry.pid,
            "trace_store": self.store.pid,
        }

    async def query(self, sql: str) -> list[Any]:
        """Return the first row of a query."""
        client = await clickhouse_connect.get_async_client(
            host="127.0.0.1", port=self.store_port, database=_DATABASE, send_receive_timeout=300
        )
        try:
            return list((await client.query(sql)).result_rows[0])
        finally:
            await client.close()


def _telemetry_spec(home: Path, broker_port: int, store_port: int, port: int) -> ProcessSpec:
    return ProcessSpec(
        name="telemetry",
        command=[sys.executable, "-m", "telemetry"],
        env={
            "PATH": os.environ["PATH"],
            **shared_secret.environment(),
            "TELEMETRY__KAFKA_BOOTSTRAP": f"127.0.0.1:{broker_port}",
            "TELEMETRY__CLICKHOUSE_URL": f"http://127.0.0.1:{store_port}",
            "TELEMETRY__CLICKHOUSE_DATABASE": _DATABASE,
            "TELEMETRY__HTTP_ADDRESS": f"127.0.0.1:{port}",
            "TELEMETRY__ADMIN_KEY_SHA256": hashlib.sha256(b"benchmark").hexdigest(),
        },
        log_file=home / "telemetry.log",
        ready=lambda: port_answers("127.0.0.1", port),
    )


@asynccontextmanager
async def running_site(home: Path) -> AsyncGenerator[PipelineSite]:
    """Start broker, trace store and telemetry, and stop them when the context ends."""
    ports = free_port(), free_port(), free_port()
    environment = {"PATH": os.environ["PATH"]}
    specs = (
        broker_spec(ports[0], home / "broker.log", environment),
        tracestore_spec(ports[1], home / "traces", home / "store.log", environment),
        _telemetry_spec(home, ports[0], ports[1], ports[2]),
    )
    async with AsyncExitStack() as stack:
        children: list[ChildProcess] = []
        for spec in specs:
            children.append(await ChildProcess.start(spec))
            stack.push_async_callback(children[-1].stop)
            await children[-1].wait_ready(60)
        site = PipelineSite(
            home, children[0], ports[0], children[2], ports[2], children[1], ports[1]
        )

        async def is_ready() -> bool:
            return await _metric(site, "telemetry_ready") == 1

        await _until(is_ready)
        try:
            yield site
        finally:
            await site.broker.stop()  # an outage has replaced the first broker


@asynccontextmanager
async def _producing(site: PipelineSite, *, burst: int, rate: float) -> AsyncGenerator[_Producers]:
    command = [sys.executable, "-m", "benchmarks.load.telemetry_pipeline", "produce"]
    command += [f"127.0.0.1:{site.broker_port}", str(site.home / "spool")]
    children = [
        await asyncio.create_subprocess_exec(
            *(*command, str(number), str(burst // _PRODUCERS), str(rate / _PRODUCERS)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(_PRODUCERS)
    ]
    producers = _Producers(children)
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(_PRODUCERS):
                group.create_task(producers.read(number))
            yield producers
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()


async def _until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_DRAIN_S):
        while not await is_so():  # noqa: ASYNC110 - the state of other processes
            await asyncio.sleep(0.25)


async def _written(site: PipelineSite) -> int:
    """Return the number of distinct event ids in the store."""
    return (await site.query("SELECT uniqExact(event_id) FROM requests"))[0]


async def _metric(site: PipelineSite, name: str) -> float:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{site.telemetry_port}") as http:
        for line in (await http.get("/metrics", timeout=30)).text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise KeyError(name)


async def _under_way(site: PipelineSite, producers: _Producers) -> float:
    return producers.total("emitted") - await _metric(site, "telemetry_events_written_total")


async def _found(site: PipelineSite, producers: _Producers) -> dict[str, Any]:
    """Wait until the sink has written all events, and count those in the store."""
    emitted = int(producers.total("emitted"))

    async def is_all() -> bool:
        return await _written(site) >= emitted

    with suppress(TimeoutError):
        await _until(is_all)
    found = await _written(site)
    rows, seen = await site.query("SELECT count(), uniqExact(event_id) FROM requests FINAL")
    written = await _metric(site, "telemetry_events_written_total")
    return {
        "emitted": emitted,
        "found": found,
        "lost": emitted - found,
        "doubled_for_readers": rows - seen,
        "written_more_than_once": int(written) - found,
        "dropped_by_producers": int(producers.total("dropped")),
    }


def _per_event(before: dict[str, float], after: dict[str, float], events: int) -> dict[str, float]:
    return {name: round((after[name] - before[name]) / events * 1e6, 1) for name in after}


def _cpu(site: PipelineSite) -> dict[str, float]:
    return {name: cpu_s([pid]) for name, pid in site.pids.items()}


async def measure_steady(rate: float, seconds: float) -> dict[str, Any]:
    """Emit at a rate for some seconds, then wait until all events are stored."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with running_site(Path(folder)) as site:
            before = _cpu(site)
            under_way: list[int] = []
            async with _producing(site, burst=0, rate=rate) as producers:
                began_s = time.monotonic()
                while time.monotonic() < began_s + seconds:
                    await asyncio.sleep(_SAMPLE_S)
                    under_way.append(round(await _under_way(site, producers)))
                lasted_s = time.monotonic() - began_s
                await producers.end()
            figures = await _found(site, producers)
            drained_s = time.monotonic() - began_s - lasted_s
            emitted = figures["emitted"]
            cpu_us = _per_event(before, _cpu(site), emitted)
            cpu_us["producers"] = round(producers.total("cpu_s") / emitted * 1e6, 1)
            return {
                "rate_wanted_per_s": rate,
                "rate_emitted_per_s": round(emitted / lasted_s),
                **figures,
                "under_way_median": sorted(under_way)[len(under_way) // 2],
                "under_way_max": max(under_way),
                "under_way": under_way,
                "drained_after_s": round(drained_s, 1),
                "cpu_us_per_event": cpu_us,
                "cores_used": round(sum(cpu_us.values()) * emitted / lasted_s / 1e6, 2),
                "telemetry_mib": round(memory_bytes([site.telemetry.pid]) / 2**20),
                "trace_store_mib": round(memory_bytes([site.store.pid]) / 2**20),
            }


async def measure_outage(rate: float) -> dict[str, Any]:
    """Spool ten minutes of events on the producers' disks, then start the broker again."""
    burst = round(rate * _OUTAGE_S)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with running_site(Path(folder)) as site:
            await site.broker.stop(grace_s=0)
            before = _cpu(site) | {"broker": 0.0}
            async with _producing(site, burst=burst, rate=rate) as producers:

                async def is_spooled() -> bool:
                    said = producers.said.values()
                    return len(said) == _PRODUCERS and all(one["is_burst_over"] for one in said)

                async def has_caught_up() -> bool:
                    spooled = producers.total("spool_bytes")
                    return not spooled and await _under_way(site, producers) <= rate

                began_s = time.monotonic()
                await _until(is_spooled)
                spooled_s = time.monotonic() - began_s
                spool_bytes = producers.total("spool_bytes")
                environment = {"PATH": os.environ["PATH"]}
                spec = broker_spec(site.broker_port, site.home / "broker.log", environment)
                site.broker = await ChildProcess.start(spec)
                back_s = time.monotonic()
                await _until(has_caught_up)
                caught_up_s = time.monotonic() - back_s
                await producers.end()
            figures = await _found(site, producers)
            return {
                "rate_per_s": rate,
                "spooled_events": burst,
                "spooled_mib": round(spool_bytes / 2**20),
                "spooled_in_s": round(spooled_s, 1),
                "caught_up_after_s": round(caught_up_s, 1),
                "replayed_per_s": round((burst + caught_up_s * rate) / caught_up_s),
                **figures,
                "messages_missing_at_the_broker": await _metric(
                    site, "telemetry_messages_missing_total"
                ),
                "cpu_us_per_event": _per_event(before, _cpu(site), figures["emitted"]),
            }


def main() -> None:
    """Run the measurements that are named, by default both, and write a result for each."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["produce"]:
        address, spool, number, burst, rate = arguments[1:]
        _produce(address, Path(spool), int(number), int(burst), float(rate))
        return
    measure = arguments[:1] or ["steady", "outage"]
    numbers = [float(one) for one in arguments[1:]]
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    for name in measure:
        if name == "steady":
            defaults = [_RATE, _STEADY_S]
            rate, seconds = [*numbers, *defaults[len(numbers) :]]
            figures = asyncio.run(measure_steady(rate, seconds))
        else:
            figures = asyncio.run(measure_outage(*(numbers or [_OUTAGE_RATE])))
        path = write_result(f"telemetry_{name}", operation, figures)
        print(path, json.dumps(figures))


if __name__ == "__main__":
    main()
