"""CPU of shipping one request event: on the request's path, and in the whole process.

One operation: `EventProducer.emit` of a filled event (all ids, digests and times set). `emit` is
CPU time of the calling thread alone: what a request pays. `process` adds the shipping thread and
librdkafka's threads until every event is at the broker (or, with the broker away, on disk). Not
measured: building the event, the broker (a process of its own), the sink. Events are emitted in
bursts of 100 with pauses, as a busy gateway would; read the medians of the rounds, in
microseconds. Run: `python -m benchmarks.micro.event_emit`.
"""

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.results import write_result
from cli.stack.broker import broker_spec
from sluice.events import REQUESTS_TOPIC, EventProducer
from sluice.process import ChildProcess, free_port
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

_ROUNDS = 7
_EVENTS = 20_000
_BURST = 100
_BURST_PAUSE_S = 0.005
_WAIT_S = 60.0


def filled_event() -> RequestEvent:
    """Return an event of realistic size (about 490 bytes)."""
    return RequestEvent(
        schema_version=1,
        event_id="evt_" + "0" * 26,
        received_at_unix_ms=1_790_000_000_000,
        request_id="req_" + "0" * 26,
        trace_id="0123456789abcdef" * 2,
        tenant_id="ten_" + "0" * 26,
        key_id="key_" + "0" * 26,
        tier_id="standard",
        session_hash=2**63 + 1,
        model="sluice-tiny",
        requested_model="sluice-tiny",
        release="12",
        base_digest="b" * 64,
        adapter_digest="a" * 64,
        pool_id="pool-a",
        cell_id="pool-a/0",
        replica_id="replica-00017",
        router_id="router-3",
        gateway_id="gateway-11",
        endpoint="chat.completions",
        is_stream=True,
        prompt_tokens=1234,
        cached_tokens=1024,
        output_tokens=321,
        gateway_us=812,
        queue_us=15_321,
        engine_queue_us=210,
        prefill_us=45_678,
        ttft_us=63_000,
        total_us=4_321_000,
        itl_max_us=54_000,
        outcome="stop",
        status=200,
    )


def one_round(address: str, spool: Path, *, is_away: bool) -> tuple[float, float, int]:
    """Emit `_EVENTS` events; return microseconds per event of `emit` and of the process, drops."""
    event = filled_event()
    producer = EventProducer(
        address, REQUESTS_TOPIC, spool_directory=spool, broker_wait_s=0.5 if is_away else 30.0
    )
    emit_ns = 0
    process_from = time.process_time_ns()
    for _ in range(_EVENTS // _BURST):
        started = time.thread_time_ns()
        for _ in range(_BURST):
            producer.emit(event)
        emit_ns += time.thread_time_ns() - started
        time.sleep(_BURST_PAUSE_S)
    if is_away:
        deadline = time.monotonic() + _WAIT_S
        while producer.stats.spooled < _EVENTS and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        producer.flush(_WAIT_S)
    process_ns = time.process_time_ns() - process_from
    stats = producer.stats
    arrived = stats.spooled if is_away else stats.delivered
    producer.close(0.0)
    return emit_ns / 1e3 / _EVENTS, process_ns / 1e3 / _EVENTS, _EVENTS - arrived


def measure(address: str, *, is_away: bool) -> dict[str, float]:
    """Return the medians of several rounds."""
    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            one_round(address, Path(folder) / str(number), is_away=is_away)
            for number in range(_ROUNDS)
        ]
    return {
        "emit_us": round(statistics.median(one[0] for one in rounds), 2),
        "process_us": round(statistics.median(one[1] for one in rounds), 2),
        "not_shipped": sum(one[2] for one in rounds),
    }


async def _run(home: Path) -> dict[str, dict[str, float]]:
    port = free_port()
    environment = {"PATH": os.environ["PATH"]}
    broker = await ChildProcess.start(broker_spec(port, home / "broker.log", environment))
    try:
        await broker.wait_ready(30)
        there = await asyncio.to_thread(measure, f"127.0.0.1:{port}", is_away=False)
    finally:
        await broker.stop()
    away = await asyncio.to_thread(measure, f"127.0.0.1:{free_port()}", is_away=True)
    return {"broker_there": there, "broker_away_spooling": away}


def main() -> None:
    """Run all cases and write `benchmarks/results/event_emit.json`."""
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(_run(Path(folder)))
    parameters = {
        "events": _EVENTS,
        "rounds": _ROUNDS,
        "event_bytes": filled_event().ByteSize(),
    }
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    path = write_result("event_emit", operation, {"parameters": parameters, **results})
    print(path.read_text())


if __name__ == "__main__":
    main()
