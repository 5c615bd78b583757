"""Measures telemetry's share of the CPU time of gateway and router.

One operation is one unary request of one token, through a gateway worker, a router and the `sim`
driver, each in its own process. This request has the least other work, so telemetry's share is
smaller for longer answers. The denominator is the CPU time of gateway and router per request, from
/proc. The numerator is the sum of the following parts, timed in this process right before and after
the requests. `closing` creates the part of the event that the router receives, and `event` the
event at the end. `emit` is the producer's call, and `shipping` the threads of producer and
librdkafka, with a running broker. `metrics` updates the counters and histograms of a request.
`router` is the router's work for closings and token counts. Not measured: spans, the transport of
the closing, scrapes of metrics. The figure to read is `share`. Run:
`python -m benchmarks.load.telemetry_share`.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.load.gateway import measure_unary
from benchmarks.load.stack import started
from benchmarks.micro.event_emit import Callers, generation, making, measure
from benchmarks.results import write_result
from cli.stack.broker import broker_spec
from gateway.metrics import GatewayMetrics
from router.closing import Accounts
from router.core.types.batch import GatewayBatch
from router.counting import TokenCounts
from sluice.process import ChildProcess, free_port
from sluice.wire.router.v1 import router_pb2 as wire

_ROUNDS = 7
_CALLS = 5_000


def _per_call_us(prepare: Callable[[int], Any], call: Callable[[Any], object]) -> float:
    """Return the CPU time of one call without its preparation, as the median of the rounds."""
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        prepared = [prepare(number) for number in range(_CALLS)]
        began_ns = time.thread_time_ns()
        for it in prepared:
            call(it)
        rounds.append((time.thread_time_ns() - began_ns) / 1e3 / _CALLS)
    return statistics.median(rounds)


def gateway_parts() -> dict[str, float]:
    """Return microseconds per request of the gateway's own thread."""
    metrics, made = GatewayMetrics(), making()

    def observe(_: object) -> None:
        metrics.ttft.observe(0.2)
        metrics.before_router.observe(0.001)
        metrics.total.observe(1.5)
        metrics.ended(
            "ten_1",
            "",
            ttft_s=0.2,
            decode_s=1.3,
            prefill_s=0.05,
            prompt_tokens=1234,
            output_tokens=321,
            answers=1,
        )
        metrics.prompt_tokens.inc(1234)
        metrics.cached_tokens.inc(1024)
        metrics.output_tokens.inc(321)

    return {
        "closing": made["closing_us"],
        "event": made["event_us"],
        "metrics": _per_call_us(lambda number: number, observe),
    }


def router_parts() -> dict[str, float]:
    """Return microseconds per request of the router's closings and counts."""
    accounts, callers = Accounts(TokenCounts("router-1", 1)), Callers()

    def prepare(number: int) -> tuple[wire.Submit, GatewayBatch]:
        asked = generation()
        callers.request(number).prepare_closings([asked], 1, "gateway-11")
        submit = wire.Submit(handle=number, closing=asked.closing)
        submit.prompt.extend([1] * 1234)
        batch = GatewayBatch()
        batch.placed.append(wire.Placed(handle=number, replica_id="replica-00017"))
        kind = wire.OUTCOME_KIND_LENGTH
        batch.outcomes.append(wire.Outcome(handle=number, kind=kind, output_tokens=321))
        return submit, batch

    def account(it: tuple[wire.Submit, GatewayBatch]) -> None:
        accounts.submitted([it[0]])
        accounts.note_outcomes(it[1], time.monotonic())

    return {"router": _per_call_us(prepare, account)}


async def _shipping(home: Path) -> dict[str, float]:
    port = free_port()
    environment = {"PATH": os.environ["PATH"]}
    broker = await ChildProcess.start(broker_spec(port, home / "broker.log", environment))
    try:
        await broker.wait_ready(30)
        found = await asyncio.to_thread(measure, f"127.0.0.1:{port}", is_away=False)
    finally:
        await broker.stop()
    return {"emit": found["emit_us"], "shipping": found["process_us"] - found["emit_us"]}


def _parts() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return {**gateway_parts(), **router_parts(), **asyncio.run(_shipping(Path(folder)))}


def main() -> None:
    """Measure the parts, the requests, and the parts again, and write the result."""
    before = _parts()
    with started("sim", "--no-embeddings") as stack:
        unary = measure_unary(stack)
    after = _parts()
    parts = {name: round(statistics.mean((before[name], after[name])), 2) for name in before}
    total_us = sum(unary["cpu_us_per_request"].values())
    on_path = sum(parts[name] for name in ("closing", "event", "emit", "metrics"))
    figures = {
        "telemetry_us_per_request": parts,
        "on_the_request_path_us": round(on_path, 1),
        "events_on_the_request_path_us": round(on_path - parts["metrics"], 1),
        "requests": unary,
        "share": round(sum(parts.values()) / total_us, 3),
    }
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    print(write_result("telemetry_share", operation, figures), json.dumps(figures))


if __name__ == "__main__":
    main()
