"""Spans reach a collector over OTLP/HTTP as it reads them; one that is away costs only spans."""

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
import pytest_asyncio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from sluice.wire.telemetry.v1.telemetry_pb2 import Attempt, RequestEvent
from telemetry import otlp
from telemetry.metrics import TelemetryMetrics
from telemetry.otlp import SpanExport, http_exporter

pytestmark = pytest.mark.real

TRACE, UID = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"


class Collector:
    """Answers with `status`, and keeps what it took."""

    def __init__(self) -> None:
        self.status = 200
        self.took: asyncio.Queue[ExportTraceServiceRequest] = asyncio.Queue()
        self.refused = asyncio.Event()
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp has undone the compression
        message = ExportTraceServiceRequest.FromString(
            gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        )
        if self.status == 200:
            self.took.put_nowait(message)
        else:
            self.refused.set()
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, status=self.status, content_type="application/x-protobuf")


@pytest_asyncio.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(otlp, "_GATHER_S", 0.01)
    it = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", it.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    it.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield it
    await runner.cleanup()


@asynccontextmanager
async def exporting(url: str, metrics: TelemetryMetrics) -> AsyncIterator[SpanExport]:
    export = SpanExport(partial(http_exporter, url), metrics, slow_us=1_000_000)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(export.run())
        yield export
        running.cancel()


def event(**fields: object) -> RequestEvent:
    known = {
        "event_id": f"evt_{UID}",
        "trace_id": TRACE,
        "parent_span_id": "b7" * 8,
        "tracestate": "vendor=1",
        "is_sampled": True,
        "received_at_unix_ms": 1_790_000_000_000,
        "gateway_us": 500,
        "total_us": 2_000,
        "status": 200,
        "outcome": "stop",
        "tenant_id": "ten_a",
        "endpoint": "/v1/chat/completions",
        "requested_model": "m",
    }
    return RequestEvent(**known | fields)  # type: ignore[arg-type]


def sample(metrics: TelemetryMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"telemetry_{name}_total", labels) or 0.0


async def test_spans_arrive_with_the_callers_trace_and_none_of_unwanted_requests(
    collector: Collector,
) -> None:
    metrics = TelemetryMetrics()
    async with exporting(collector.url, metrics) as export:
        export.offer([event(), event(event_id="evt_other", is_sampled=False)])
        async with asyncio.timeout(30):
            message = await collector.took.get()
    [resource] = message.resource_spans
    assert {it.key: it.value.string_value for it in resource.resource.attributes}[
        "service.name"
    ] == "sluice"
    spans = resource.scope_spans[0].spans
    assert [span.name for span in spans] == ["chat m", "gateway", "attempt", "queue"]
    root = spans[0]
    assert (root.trace_id.hex(), root.span_id.hex()) == (TRACE, UID[16:])
    assert (root.parent_span_id.hex(), root.trace_state) == ("b7" * 8, "vendor=1")
    assert root.end_time_unix_nano - root.start_time_unix_nano == 2_000_000
    assert {span.parent_span_id for span in spans[1:3]} == {root.span_id}
    values = {it.key: it.value for it in root.attributes}
    assert values["gen_ai.operation.name"].string_value == "chat"
    assert values["sluice.tenant.id"].string_value == "ten_a"
    assert sample(metrics, "spans_exported") == 4
    assert not sample(metrics, "spans_dropped", reason="late")


async def test_spans_refused_by_a_collector_and_excess_spans_are_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "_QUEUE_MAX", 2)
    collector.status = 400
    metrics = TelemetryMetrics()
    async with exporting(collector.url, metrics) as export:
        export.offer([event(event_id=f"evt_{number}") for number in range(5)])
        async with asyncio.timeout(30):
            await collector.refused.wait()
        collector.status = 200
        export.offer([event()])
        async with asyncio.timeout(30):
            await collector.took.get()
    assert sample(metrics, "spans_dropped", reason="full") == 3
    assert sample(metrics, "spans_dropped", reason="refused") == 2
    assert sample(metrics, "spans_exported") == 4


async def test_spans_waiting_at_the_end_are_sent_or_counted(collector: Collector) -> None:
    metrics = TelemetryMetrics()
    async with exporting("http://127.0.0.1:1/v1/traces", metrics) as export:
        await asyncio.sleep(0)
        export.offer([event()])
    lost = [sample(metrics, "spans_dropped", reason=it) for it in ("refused", "late", "stopped")]
    assert sum(lost) <= 1
    assert sample(metrics, "spans_exported") == 0


class Stuck:
    """An exporter that comes back when it is let go, and what it was given."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_called, self.may_end = asyncio.Event(), threading.Event()
        self.threads: list[threading.Thread] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.threads.append(threading.current_thread())
        self.loop.call_soon_threadsafe(self.is_called.set)
        self.may_end.wait(30)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


async def test_a_send_that_hangs_takes_one_thread_and_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_GATHER_S", "_SEND_S", "_STOP_S"):
        monkeypatch.setattr(otlp, name, 0.01)
    stuck, metrics = Stuck(), TelemetryMetrics()
    export = SpanExport(lambda: stuck, metrics, slow_us=0)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(export.run())
        export.offer([event()])
        async with asyncio.timeout(30):
            await stuck.is_called.wait()
        export.offer([event(), event()])
        running.cancel()
    [thread] = stuck.threads
    assert thread.daemon
    assert thread.is_alive()
    assert sample(metrics, "spans_dropped", reason="late") == 1
    assert sample(metrics, "spans_dropped", reason="stopped") == 2
    stuck.may_end.set()
    await asyncio.to_thread(thread.join, 30)


async def test_spans_chosen_by_callers_go_before_failed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "_QUEUE_MAX", 2)
    metrics = TelemetryMetrics()
    export = SpanExport(Stuck, metrics, slow_us=0)
    failed = event(status=503, attempts=[Attempt(reason="full", decision=b"long")])
    export.offer([failed, event(), event(event_id="evt_last")])
    export.offer([event(), event(is_sampled=False)])
    [first, second] = export._take()
    assert (first.status, first.attempts) == (503, [Attempt(reason="full")])
    assert second.is_sampled
    assert failed.attempts[0].decision
    assert sample(metrics, "spans_dropped", reason="full") == 2
