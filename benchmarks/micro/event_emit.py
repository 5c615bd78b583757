"""Measures the CPU time of a request's telemetry event, on the request's path and in all threads.

One operation is the event of one streamed request with one answer. `closing` is the part of the
event that the router receives at the start (`Exchange.prepare_closings`). `event` creates the event
at the request's end (`Exchange.event`, with limits and a placement). `emit` is
`EventProducer.emit`, and `sum` is the sum of these three. They are CPU times of the calling thread,
with a hundred open requests of a hundred callers. The same callers repeat and the control plane
sends no change, so the part that a caller's events share is already cached. `closing_first` also
computes this part, as after each change of keys, tenants, tiers or models. `process` is the CPU
time of the whole process from `emit` until every event is at the broker. If the broker is
unreachable, `process` ends when all events are on disk. It includes the shipping thread and
librdkafka's threads. Events are emitted in bursts of 100 with pauses, as in a busy gateway. Figures
are medians of the rounds, in microseconds per event. Not measured: the broker (another process),
the sink, and the transport of the closing.
Run: `python -m benchmarks.micro.event_emit`.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.results import write_result
from cli.stack.broker import broker_spec
from gateway.directory import Principal
from gateway.dispatch.attempts import Attempt, AttemptPlacement
from gateway.dispatch.tally import Tally
from gateway.endpoints.exchange import HttpExchange
from gateway.limits.buckets import BucketScope
from gateway.limits.forecast import AnswerForecast
from gateway.limits.limiter import Reservation
from sluice.events import REQUESTS_TOPIC, EventProducer
from sluice.process import ChildProcess, free_port
from sluice.wire.control.v1 import control_pb2 as control
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


class Callers:
    """A hundred callers, each with a key, who send requests in turn."""

    def __init__(self) -> None:
        like = filled_event()
        names = ("release", "base_digest", "adapter_digest", "pool_id")
        self._like = like
        self._model = control.Model(id=like.model, **{name: getattr(like, name) for name in names})
        self._principals = [
            Principal(
                control.ApiKey(id=f"key_{number:026}", tenant_id=f"ten_{number:026}"),
                control.Tenant(id=f"ten_{number:026}"),
                control.Tier(id=like.tier_id),
            )
            for number in range(_BURST)
        ]
        self._scopes = [
            BucketScope("limits:{t}", "your account", "account", rpm=6_000, tpm=1_000_000),
            BucketScope("limits:{t}:key:k", "your key", "key", rpm=600),
        ]

    def requests(self) -> list[HttpExchange]:
        """Return one request of each caller."""
        return [self.request(number) for number in range(_BURST)]

    def request(self, number: int) -> HttpExchange:
        """Return a request of one caller."""
        like = self._like
        return HttpExchange(
            uid=f"{number:032}",
            request_id=f"req_{number:026}",
            trace_id=f"{number:032x}",
            endpoint="/v1/chat/completions",
            received_at_s=1.0,
            received_at_unix_ms=like.received_at_unix_ms + number,
            principal=self._principals[number % _BURST],
            model=self._model,
            requested_model=like.requested_model,
            reservation=Reservation(
                self._scopes, (0,) * len(self._scopes), 1500, AnswerForecast(), 1, None, False
            ),
            is_stream=True,
            choices=1,
        )


def generation() -> Any:
    """Return a substitute for `Generation` (one answer's state) with the fields of a closing."""
    return SimpleNamespace(spec=SimpleNamespace(session_hash=5, prompt=[1] * 1234), closing=b"")


def tally() -> Tally:
    """Return the tally of a request that one replica has answered."""
    attempt = Attempt(0, "pool-a/0", "router-3", 1.001, 0)
    attempt.placed = AttemptPlacement("replica-00017", queue_us=15, engine_queue_us=9)
    return Tally(
        prompt_tokens=1234,
        cached_tokens=1024,
        output_tokens=321,
        placed_prompt_tokens=1234,
        session_hash=2**63 + 1,
        prefill_us=45_678,
        submitted_at_s=1.001,
        cell_id="pool-a/0",
        router_id="router-3",
        first_at_s=1.062,
        itl_max_s=0.054,
        placed=attempt.placed,
        attempts=[[attempt]],
    )


def _close(exchange: HttpExchange) -> None:
    """Set the outcome of a request, as at its end."""
    exchange.first_sent_at_s = 1.063
    exchange.outcome, exchange.status = "stop", 200


def closings_ns(requests: Sequence[HttpExchange]) -> int:
    """Return the CPU time to prepare the requests' closings."""
    generations = [[generation()] for _ in requests]
    started = time.thread_time_ns()
    for exchange, its in zip(requests, generations, strict=True):
        exchange.prepare_closings(its, 1, "gateway-11")
    return time.thread_time_ns() - started


def events_ns(requests: Sequence[HttpExchange]) -> int:
    """Return the CPU time to build the requests' events."""
    for exchange in requests:
        _close(exchange)
    come_to = tally()
    started = time.thread_time_ns()
    for exchange in requests:
        exchange.event(come_to, "gateway-11", 5.321)
    return time.thread_time_ns() - started


def making() -> dict[str, float]:
    """Return the median microseconds per request for closing and event."""
    first, closings, events = list[float](), list[float](), list[float]()
    for _ in range(_ROUNDS):
        callers = Callers()
        first.append(closings_ns(callers.requests()) / 1e3 / _BURST)
        closing_ns = event_ns = 0
        for _ in range(_EVENTS // _BURST):
            requests = callers.requests()
            closing_ns += closings_ns(requests)
            event_ns += events_ns(requests)
        closings.append(closing_ns / 1e3 / _EVENTS)
        events.append(event_ns / 1e3 / _EVENTS)
    return {
        "closing_us": round(statistics.median(closings), 2),
        "closing_first_us": round(statistics.median(first), 2),
        "event_us": round(statistics.median(events), 2),
    }


def one_round(address: str, spool: Path, *, is_away: bool) -> tuple[float, float, int]:
    """Emit `_EVENTS` events. Returns µs per event of `emit` and process, and dropped events."""
    payload = filled_event().SerializeToString()
    producer = EventProducer(
        address, REQUESTS_TOPIC, spool_directory=spool, broker_wait_s=0.5 if is_away else 30.0
    )
    emit_ns = 0
    process_from = time.process_time_ns()
    for _ in range(_EVENTS // _BURST):
        started = time.thread_time_ns()
        for _ in range(_BURST):
            producer.emit(payload)
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
    """Return the medians of several rounds, in microseconds per event."""
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
    path = await asyncio.to_thread(making)
    path["emit_us"] = there["emit_us"]
    path["sum_us"] = round(path["closing_us"] + path["event_us"] + path["emit_us"], 2)
    return {"request_path": path, "broker_there": there, "broker_away_spooling": away}


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
