"""Sends spans to an OpenTelemetry collector, beside the sink and never in its way.

Events are offered after they were written. Those that are wanted wait in a bounded queue; when the
collector is away or slow the oldest go, and are counted. Spans are made in a thread, where they are
sent. A replay of the broker offers events again: the same spans with the same ids.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from telemetry.metrics import Metrics
from telemetry.spans import Span, is_wanted, spans_of

log = structlog.get_logger(__name__)

_QUEUE_MAX = 20_000  # events; about 1 kB each
_BATCH = 256  # events per message, some six spans each
_SEND_S = 10.0  # with the exporter's own retries
_GATHER_S = 1.0  # how long spans may wait for company
_STOP_S = 2.0
_RESOURCE = Resource({"service.name": "sluice", "telemetry.sdk.language": "python"})
_SCOPE = InstrumentationScope("sluice.telemetry")


class Exporter(Protocol):
    """Sends spans; blocks (`opentelemetry`'s exporters)."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send all or say that it failed."""
        ...

    def shutdown(self) -> None:
        """Give up what is being sent."""
        ...


def http_exporter(endpoint: str) -> Exporter:
    """Return one for OTLP over HTTP; headers and certificates are in OpenTelemetry's variables."""
    return OTLPSpanExporter(endpoint, timeout=_SEND_S, compression=Compression.Gzip)


class SpanExport:
    """What is to be exported; `run` belongs into a TaskGroup."""

    def __init__(self, exporter: Callable[[], Exporter], metrics: Metrics, *, slow_us: int) -> None:
        """Prepare; `slow_us` as in `telemetry.spans.is_wanted`."""
        self._make = exporter
        self._metrics = metrics
        self._slow_us = slow_us
        self._queue: deque[RequestEvent] = deque()
        self._has_some = asyncio.Event()

    def offer(self, events: Sequence[RequestEvent]) -> None:
        """Queue those that are wanted; never waits."""
        wanted = [event for event in events if is_wanted(event, self._slow_us)]
        self._queue += wanted
        surplus = len(self._queue) - _QUEUE_MAX
        for _ in range(surplus):
            self._queue.popleft()
        if surplus > 0:
            self._metrics.spans_dropped.labels(reason="full").inc(surplus)
        if wanted:
            self._has_some.set()

    async def run(self) -> None:
        """Send what is offered until cancelled; then what is left, for two seconds."""
        exporter = await asyncio.to_thread(self._make)
        try:
            while True:
                await self._has_some.wait()
                await asyncio.sleep(0 if len(self._queue) >= _BATCH else _GATHER_S)
                await self._send(exporter, self._take())
        finally:
            await self._finish(exporter)

    async def _finish(self, exporter: Exporter) -> None:
        try:
            async with asyncio.timeout(_STOP_S):
                while self._queue:
                    await self._send(exporter, self._take())
        except TimeoutError:
            self._metrics.spans_dropped.labels(reason="stopped").inc(len(self._queue))
        exporter.shutdown()  # also ends a retry that a thread still waits for

    def _take(self) -> list[RequestEvent]:
        taken = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        if not self._queue:
            self._has_some.clear()
        return taken

    async def _send(self, exporter: Exporter, events: list[RequestEvent]) -> None:
        """Send the spans of some events; a collector that does not take them loses them."""
        sending = asyncio.get_running_loop().run_in_executor(None, _export, exporter, events)
        try:
            await asyncio.wait([sending], timeout=2 * _SEND_S)
        except asyncio.CancelledError:
            await asyncio.wait([sending], timeout=_STOP_S)
            raise
        finally:
            self._count(sending, len(events))

    def _count(self, sending: asyncio.Future[int], requests: int) -> None:
        problem = "refused"
        if not sending.done():
            sending.cancel()  # its thread may go on until the exporter is shut down
            problem = "late"
        elif (error := sending.exception()) is not None:
            log.error("spans_not_made", exc_info=error)  # a bug here must not end the sink
        elif spans := sending.result():
            self._metrics.spans_exported.inc(spans)
            return
        self._metrics.spans_dropped.labels(reason=problem).inc(requests)
        log.warning("spans_dropped", requests=requests, reason=problem)


def _export(exporter: Exporter, events: Sequence[RequestEvent]) -> int:
    """Return how many spans were taken; 0: none."""
    spans = [readable(span) for event in events for span in spans_of(event)]
    return len(spans) if exporter.export(spans) is SpanExportResult.SUCCESS else 0


def readable(span: Span) -> ReadableSpan:
    """Return a span as OpenTelemetry's exporters take it."""
    context = _context(span, span.span_id)
    status = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=_context(span, span.parent_id) if span.parent_id else None,
        resource=_RESOURCE,
        attributes=span.attributes,
        kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
        status=status,
        start_time=span.start_us * 1000,
        end_time=span.end_us * 1000,
        instrumentation_scope=_SCOPE,
    )


def _context(span: Span, span_id: str) -> SpanContext:
    return SpanContext(
        trace_id=int(span.trace_id, 16),
        span_id=int(span_id, 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([span.tracestate]) if span.tracestate else None,
    )
