"""Composition root of a gateway worker; production and tests run the very same thing."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import structlog
from aiohttp import web

from gateway.bases.assets import AssetCache
from gateway.bodies.chat import BODY_BYTES_MAX
from gateway.directory import Directory
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.routers import RouterLinks
from gateway.endpoints.chat import ChatCompletions
from gateway.endpoints.models import SmallEndpoints
from gateway.limits.limiter import Limiter
from gateway.limits.valkey import ValkeyClient
from gateway.metrics import GatewayMetrics
from gateway.server.middleware import Envelope
from gateway.settings import GatewaySettings
from sluice.errors import RejectedError
from sluice.events import REQUESTS_TOPIC, EventProducer
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as control

log = structlog.get_logger(__name__)

_BACKLOG = 4096
_KEEPALIVE_S = 75.0
_AFTER_DRAIN_S = 2.0  # for handlers to write their last event


class Gateway:
    """A running worker. Use `running_gateway` to get one."""

    def __init__(self, settings: GatewaySettings, events: EventProducer) -> None:
        """Compose everything; nothing is opened yet, apart from what `events` does."""
        self.settings = settings
        self.metrics = GatewayMetrics()
        self.watcher = ControlWatcher(
            settings.control_address,
            control.ROLE_GATEWAY,
            settings.instance_id,
            snapshot_file=settings.state_dir / f"{settings.instance_id}.snapshot",
        )
        self.directory = Directory(self.watcher.state)
        self.links = RouterLinks(self.directory, settings.instance_id)
        self.assets = AssetCache(settings.artifacts_dir)
        self.valkey = ValkeyClient(
            settings.valkey_url.get_secret_value(), deadline_s=settings.limit_deadline_s
        )
        self.limiter = Limiter(
            self.valkey,
            local_share=settings.limit_local_share,
            clock=asyncio.get_running_loop().time,
        )
        self.dispatcher = Dispatcher(self.links)
        self.events = events
        self.is_draining = False
        self._changed = asyncio.Event()
        self.watcher.on_change(self._follow)
        self._follow_metrics()

    def not_ready_because(self) -> str:
        """Return why requests cannot be served now, or an empty string."""
        if self.is_draining:
            return "the server is stopping"
        if self.watcher.age_s() == float("inf"):
            return "nothing is known from the control plane yet"
        return "" if self.links.up else "no router is connected"

    def application(self) -> web.Application:
        """Return the HTTP application."""
        chat = ChatCompletions(
            directory=self.directory,
            assets=self.assets,
            limiter=self.limiter,
            dispatcher=self.dispatcher,
            metrics=self.metrics,
            emit=self.events.emit,
            gateway_id=self.settings.instance_id,
        )
        small = SmallEndpoints(
            directory=self.directory,
            metrics=self.metrics,
            not_ready_because=self.not_ready_because,
        )
        envelope = Envelope(self.metrics, log_every=self.settings.log_every)

        @web.middleware
        async def outermost(request: web.Request, handler: object) -> web.StreamResponse:
            return await envelope(request, handler)  # pyright: ignore[reportArgumentType]

        application = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[outermost])
        application.router.add_post("/v1/chat/completions", chat.handle)
        application.router.add_get("/v1/models", small.list_models)
        application.router.add_get("/v1/models/{id:.+}", small.get_model)
        application.router.add_get("/healthz", small.health)
        application.router.add_get("/readyz", small.ready)
        application.router.add_get("/metrics", small.metrics)
        return application

    async def drain(self) -> None:
        """Let what runs finish, for at most `drain_s`; then end the rest with an error event."""
        log.info("drain_started", open=self.dispatcher.open)
        left = await self.dispatcher.drain(self.settings.drain_s)
        if left:
            log.warning("drain_cut", open=left)
        self.dispatcher.stop_all()

    def _follow(self, response: control.WatchResponse) -> None:
        self.directory.update(response)
        self.links.update()
        if response.is_snapshot or response.removals.bases:
            self.assets.keep_only(set(self.watcher.state.bases))
        self._changed.set()

    async def preload(self) -> None:
        """Load the bases of all models before somebody asks for them; runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            models = self.watcher.state.models.values()
            chats = filter(self.directory.generates_text, models)
            for digest in sorted({model.base_digest for model in chats}):
                with suppress(RejectedError):  # told in the log; tried again when asked for
                    await self.assets.get(digest)

    def _follow_metrics(self) -> None:
        self.metrics.follow(
            {
                "gateway_open_generations": lambda: self.dispatcher.open,
                "gateway_routers_up": lambda: self.links.up,
                "gateway_control_age_seconds": self.watcher.age_s,
                "gateway_valkey_up": lambda: self.valkey.is_connected,
                "gateway_limit_local_decisions": lambda: self.limiter.local_decisions,
                "gateway_limit_lost_settlements": lambda: self.limiter.lost_settlements,
                "gateway_events_dropped": lambda: self.events.stats.dropped,
            }
        )


def make_runner(gateway: Gateway) -> web.AppRunner:
    """Return the runner: the one place that sets how HTTP is served.

    `handler_cancellation` is off by default in aiohttp: a handler that waits for the next token
    would not notice that its client has gone.
    """
    return web.AppRunner(
        gateway.application(),
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=_AFTER_DRAIN_S,
    )


@asynccontextmanager
async def running_gateway(
    settings: GatewaySettings, sock: socket.socket | None = None
) -> AsyncGenerator[Gateway]:
    """Run a worker: listens when this yields; drains, flushes and closes when the block ends.

    Args:
        settings: Of this worker.
        sock: Bound, to listen on instead of `http_address`.
    """
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    events = EventProducer(
        settings.kafka_bootstrap,
        REQUESTS_TOPIC,
        spool_directory=settings.state_dir / "events",
    )
    try:
        gateway = Gateway(settings, events)
        gateway.watcher.load_from_disk()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(gateway.watcher.run()),
                tasks.create_task(gateway.links.run()),
                tasks.create_task(gateway.valkey.run()),
                tasks.create_task(gateway.preload()),
            ]
            await gateway.watcher.wait_synced(1.0)
            runner = make_runner(gateway)
            await runner.setup()
            site = (
                web.TCPSite(runner, settings.host, settings.port, reuse_port=True, backlog=_BACKLOG)
                if sock is None
                else web.SockSite(runner, sock, backlog=_BACKLOG)
            )
            try:
                await site.start()
                log.info("gateway_started", address=settings.http_address)
                yield gateway
            finally:
                gateway.is_draining = True
                await asyncio.sleep(settings.unready_s)
                await site.stop()
                await gateway.drain()
                await runner.cleanup()
                for task in background:
                    task.cancel()
    finally:
        await asyncio.to_thread(events.close, settings.flush_s)
        log.info("gateway_stopped")
