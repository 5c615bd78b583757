"""Exports spans to an OpenTelemetry collector without delaying the sink.

The sink offers events after it has written them to ClickHouse, and they wait in a bounded queue. If
the collector is too slow, the oldest events are dropped and counted. Events that are only sampled
are dropped before events of failed or slow requests. One daemon thread at a time builds and sends
spans. So an export that hangs delays neither the ledger nor the end of the process. If the broker
delivers an event again, its spans are sent again with the same ids.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Protocol, TypeVar

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
from telemetry.metrics import TelemetryMetrics
from telemetry.spans import Span, is_notable, spans_of

log = structlog.get_logger(__name__)

T = TypeVar("T")

_QUEUE_MAX = 20_000  # largest number of events in the queue, about 1 kB each
_BATCH = 256  # events per export, each with about six spans
_SEND_S = 10.0  # longest time for an export, in seconds, including the exporter's own retries
_GATHER_S = 1.0  # longest time that an event waits for a batch to fill, in seconds
_STOP_S = 2.0
_RESOURCE = Resource({"service.name": "sluice", "telemetry.sdk.language": "python"})
_SCOPE = InstrumentationScope("sluice.telemetry")


class Exporter(Protocol):
    """Sends spans, and blocks until they are sent, like the exporters of `opentelemetry`."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send all spans, and return whether the collector accepted them."""
        ...

    def shutdown(self) -> None:
        """Abort an export that is in progress."""
        ...


def http_exporter(endpoint: str) -> Exporter:
    """Return an exporter for OTLP over HTTP. OpenTelemetry's variables set headers and TLS."""
    return OTLPSpanExporter(endpoint, timeout=_SEND_S, compression=Compression.Gzip)


class SpanExport:
    """Exports spans of events from a bounded queue. The loop `run` runs in a TaskGroup."""

    def __init__(
        self, exporter: Callable[[], Exporter], metrics: TelemetryMetrics, *, slow_us: int
    ) -> None:
        """Create an empty queue. `telemetry.spans.is_notable` explains `slow_us`."""
        self._make = exporter
        self._metrics = metrics
        self._slow_us = slow_us
        self._notable: deque[RequestEvent] = deque()
        self._sampled: deque[RequestEvent] = deque()  # sampled events that are not notable
        self._sending: asyncio.Future[int] | None = None
        self._has_some = asyncio.Event()

    def offer(self, events: Sequence[RequestEvent]) -> None:
        """Queue the events that are notable or sampled, without waiting."""
        for event in events:
            if is_notable(event, self._slow_us):
                self._notable.append(_small(event))
            elif event.is_sampled:
                self._sampled.append(_small(event))
        surplus = self._waiting - _QUEUE_MAX
        for _ in range(surplus):
            (self._sampled or self._notable).popleft()
        if surplus > 0:
            self._metrics.spans_dropped.labels(reason="full").inc(surplus)
        if self._waiting:
            self._has_some.set()

    async def run(self) -> None:
        """Export queued events until cancelled, and then the remaining ones for up to 2 s."""
        exporter = await _in_thread(self._make)
        try:
            while True:
                await self._has_some.wait()
                await asyncio.sleep(0 if self._waiting >= _BATCH else _GATHER_S)
                await self._send(exporter, self._take())
        finally:
            await self._finish(exporter)

    async def _finish(self, exporter: Exporter) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                while self._waiting and (self._sending is None or self._sending.done()):
                    await self._send(exporter, self._take())
        self._metrics.spans_dropped.labels(reason="stopped").inc(self._waiting)
        exporter.shutdown()  # also ends the retries in a thread that has not ended

    @property
    def _waiting(self) -> int:
        return len(self._notable) + len(self._sampled)

    def _take(self) -> list[RequestEvent]:
        """Remove one batch of events from the queue and return it, with notable events first."""
        taken = [
            (self._notable or self._sampled).popleft() for _ in range(min(_BATCH, self._waiting))
        ]
        if not self._waiting:
            self._has_some.clear()
        return taken

    async def _send(self, exporter: Exporter, events: list[RequestEvent]) -> None:
        """Export the spans of some events. If the collector fails, these spans are lost.

        This returns only when the export's thread has ended, so there is one thread at a time.
        Events that arrive meanwhile are queued, or dropped if the queue is full.
        """
        self._sending = sending = _in_thread(partial(_export, exporter, events))
        try:
            await asyncio.wait([sending], timeout=2 * _SEND_S)
        except asyncio.CancelledError:
            await asyncio.wait([sending], timeout=_STOP_S)
            raise
        finally:
            self._count(sending, len(events))
        await asyncio.wait([sending])

    def _count(self, sending: asyncio.Future[int], requests: int) -> None:
        problem = "refused"
        if not sending.done():
            problem = "late"
        elif (error := sending.exception()) is not None:
            # A bug in the code that builds spans must not end the sink.
            log.error("spans_not_built", exc_info=error)
        elif spans := sending.result():
            self._metrics.spans_exported.inc(spans)
            return
        self._metrics.spans_dropped.labels(reason=problem).inc(requests)
        log.warning("spans_dropped", requests=requests, reason=problem)


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Call a function in a daemon thread, so that a hanging call cannot prevent the exit."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[], None]) -> None:
        if not told.done():  # the waiting task may have been cancelled
            set_it()

    def call() -> None:
        try:
            set_it = partial(told.set_result, function())
        except Exception as error:  # noqa: BLE001 - the waiting task raises it
            set_it = partial(told.set_exception, error)
        with suppress(RuntimeError):  # the event loop has been closed
            loop.call_soon_threadsafe(tell, set_it)

    Thread(target=call, name="spans", daemon=True).start()
    return told


def _small(event: RequestEvent) -> RequestEvent:
    """Return an event without the routers' explanations, because spans do not include them."""
    if not any(attempt.decision for attempt in event.attempts):
        return event
    copied = RequestEvent()
    copied.CopyFrom(event)
    for attempt in copied.attempts:
        attempt.ClearField("decision")
    return copied


def _export(exporter: Exporter, events: Sequence[RequestEvent]) -> int:
    """Export the spans of some events, and return the number that the collector accepted."""
    spans = [readable(span) for event in events for span in spans_of(event)]
    return len(spans) if exporter.export(spans) is SpanExportResult.SUCCESS else 0


def readable(span: Span) -> ReadableSpan:
    """Return a span as an object for OpenTelemetry's exporters."""
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
