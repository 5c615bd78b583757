"""The operations address with metrics and probes of all workers, separate from clients' address."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.server.bounds import ServerLimits
from gateway.server.errors import body_of, headers_of
from gateway.server.exposition import merged
from gateway.server.probes import Probes
from gateway.server.routes import Routes
from gateway.server.runner import HttpRunner, bound_socket
from gateway.server.workers import GatewayWorker, GatewayWorkers
from sluice.addresses import host_and_port
from sluice.certificates import refusal_of, server_tls
from sluice.errors import PlatformError
from sluice.identity import Service

_LIMITS = ServerLimits(connections_max=256, body_bytes_max=8 << 20)


class Operations:
    """Answers probes and scrapes."""

    def __init__(self, probes: Probes) -> None:
        """`probes` answers all requests."""
        self._routes = Routes()
        self._routes.add("GET", "/healthz", probes.health)
        self._routes.add("GET", "/readyz", probes.ready)
        self._routes.add("GET", "/metrics", self._metrics)
        self._probes = probes

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        if why := refusal_of(request.transport, Service.METRICS):
            return web.Response(status=HTTPStatus.FORBIDDEN, text=f"{why}\n")
        return await self._probes.metrics(request)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        try:
            route = self._routes.find(request.path)
            return await route.handler(request.method, request.path)(request)
        except PlatformError as error:
            return web.Response(
                body=body_of(error),
                status=error.status,
                headers=headers_of(error),
                content_type="application/json",
            )


@asynccontextmanager
async def serving_operations(address: str | None, probes: Probes) -> AsyncGenerator[None]:
    """Serve metrics and probes on `host:port` until the block ends. With None, serve nothing."""
    if address is None:
        yield
        return
    runner = HttpRunner(Operations(probes), _LIMITS, _ignore)
    try:
        await runner.start(bound_socket(*host_and_port(address)), server_tls(is_required=False))
        yield
    finally:
        await runner.close()


async def all_metrics(workers: GatewayWorkers) -> bytes:
    """Return one page with the metrics of all workers and of their parent."""
    asked = {worker.name: worker.link for worker in workers.live if worker.link is not None}
    answers = await asyncio.gather(*(link.metrics() for link in asked.values()))
    pages = dict(zip(asked, answers, strict=True))
    registry = CollectorRegistry()
    registry.register(WorkersCollector(lambda: workers.live, workers.ends))
    return merged(pages) + generate_latest(registry)


class WorkersCollector(Collector):
    """The parent's metrics about its workers."""

    def __init__(
        self, live: Callable[[], Sequence[GatewayWorker]], ends: Mapping[str, int]
    ) -> None:
        """`live` returns the running workers, and `ends` counts ended workers by reason."""
        self._live = live
        self._ends = ends

    def collect(self) -> list[Metric]:
        """Return the metrics."""
        live = self._live()
        running = GaugeMetricFamily(
            "gateway_workers", "Worker processes by state", labels=["state"]
        )
        retired = sum(worker.is_retired for worker in live)
        ready = sum(not worker.not_ready_because and not worker.is_retired for worker in live)
        running.add_metric(["ready"], ready)
        running.add_metric(["retired"], retired)
        running.add_metric(["not_ready"], len(live) - retired - ready)
        ends = CounterMetricFamily(
            "gateway_worker_ends", "Worker processes that have ended, by reason", labels=["reason"]
        )
        for reason, count in self._ends.items():
            ends.add_metric([reason], count)
        return [running, ends]


def _ignore(error: PlatformError, request_id: str) -> None:
    """Ignore a malformed request, because only operators call this address."""
