"""Starts the parts of the telemetry service (store, sinks, loops, HTTP server), and runs them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from sluice.addresses import host_and_port
from sluice.certificates import server_tls
from telemetry import text_rows
from telemetry.closings import Closer
from telemetry.consumer import EventConsumer
from telemetry.costs.prices import Prices
from telemetry.costs.recorded import RecordedHours
from telemetry.http import TelemetryApi
from telemetry.metrics import TelemetryMetrics
from telemetry.model_watch import ModelWatch
from telemetry.observer import SinkObserver
from telemetry.reconciliation import Reconciler
from telemetry.rollups_worker import Rollups
from telemetry.settings import Settings
from telemetry.sink import Sink
from telemetry.store import Store
from telemetry.texts import Eraser

if TYPE_CHECKING:
    from telemetry.otlp import SpanExport

log = structlog.get_logger(__name__)

_SHUTDOWN_S = 5.0
_DRAIN_S = 5.0
# Longest time to drain the texts, in seconds. It begins after the events are drained, because texts
# must not delay usage.
_TEXTS_DRAIN_S = 0.5
# Messages per batch of texts. The number is small, because a message may have hundreds of
# kilobytes.
_TEXTS_AT_ONCE = 200


def make_runner(app: web.Application) -> web.AppRunner:
    """Return the HTTP runner that production and tests share."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None)


async def run(settings: Settings, stop: asyncio.Event, prices: Prices | None = None) -> None:
    """Run until `stop` is set, and then write the messages left in the broker for at most 5 s.

    The next process reads the messages again that were not written by then.

    Args:
        settings: Settings of the service.
        stop: Event that ends the service.
        prices: Price list of the fleet, or None if no costs are computed.
    """
    metrics = TelemetryMetrics()
    if prices is not None:
        metrics.show_prices(prices.replica_prices, prices.currency)
    async with AsyncExitStack() as stack:
        store = Store(settings)
        stack.push_async_callback(store.close)
        spans = _span_export(settings, metrics)
        sink, texts_sink = _sinks(settings, store, metrics, spans)
        observer = SinkObserver(
            settings.kafka_bootstrap,
            settings.topic,
            settings.group,
            protocol=settings.kafka_group_protocol,
            metrics=metrics,
        )
        closer = Closer(store, metrics, settle_s=settings.closing_settle_s)
        reconciler = Reconciler(store, observer.progress, closer, metrics)
        rollups = Rollups(store, metrics)
        key_sha256 = settings.admin_key_sha256
        control_key = settings.control_plane_key.get_secret_value()
        recorded = await stack.enter_async_context(
            RecordedHours(settings.control_plane_url, control_key)
        )
        api = TelemetryApi(
            store, sink, observer.progress, closer, metrics, key_sha256, prices, recorded
        )
        stack.push_async_callback(await _serving(api, settings.http_address))
        log.info("telemetry_started", http_address=settings.http_address)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(sink.run())
            texts_task = group.create_task(texts_sink.run())
            watches = Eraser(store, metrics), ModelWatch(store, metrics)
            loops = [
                group.create_task(loop.run())
                for loop in (observer, closer, reconciler, rollups, *watches)
            ]
            exporting = group.create_task(_nowhere() if spans is None else spans.run())
            await stop.wait()
            for loop in loops:
                loop.cancel()
            sink.drain()
            texts_sink.drain()
            await asyncio.wait([task], timeout=_DRAIN_S)
            await asyncio.wait([texts_task], timeout=_TEXTS_DRAIN_S)
            task.cancel()
            texts_task.cancel()
            exporting.cancel()
    log.info("telemetry_stopped")


def _sinks(
    settings: Settings, store: Store, metrics: TelemetryMetrics, spans: "SpanExport | None"
) -> tuple[Sink, Sink]:
    """Return the sink of request events and the sink of texts."""
    events = Sink(
        partial(_reader, settings, settings.topic),
        store,
        metrics,
        batch_max=settings.batch_max,
        on_written=_nothing if spans is None else spans.offer,
    )
    texts = Sink(
        partial(_reader, settings, settings.texts_topic),
        store,
        metrics,
        batch_max=_TEXTS_AT_ONCE,
        decode=text_rows.decode,
        are_texts=True,
    )
    return events, texts


def _reader(settings: Settings, topic: str) -> EventConsumer:
    is_texts = topic == settings.texts_topic
    return EventConsumer(
        settings.kafka_bootstrap,
        topic,
        f"{settings.group}-texts" if is_texts else settings.group,
        protocol=settings.kafka_group_protocol,
        batch_wait_s=settings.batch_wait_s,
    )


async def _serving(api: TelemetryApi, address: str) -> Callable[[], Awaitable[None]]:
    """Start the HTTP server at a host:port, and return a function that stops the server."""
    runner = make_runner(api.application())
    await runner.setup()
    try:
        tls = server_tls(is_required=False)
        where = host_and_port(address)
        site = web.TCPSite(runner, *where, shutdown_timeout=_SHUTDOWN_S, ssl_context=tls)
        await site.start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner.cleanup


def _span_export(settings: Settings, metrics: TelemetryMetrics) -> "SpanExport | None":
    if not settings.otlp_endpoint:
        return None
    # The import takes a second of CPU time, and most installations export no spans.
    from telemetry.otlp import SpanExport, http_exporter

    exporter = partial(http_exporter, settings.otlp_endpoint)
    return SpanExport(exporter, metrics, slow_us=round(settings.otlp_slow_s * 1e6))


def _nothing(_: object) -> None:
    return None


async def _nowhere() -> None:
    return None
