"""Creates and connects all parts of a gateway worker. Production and tests run the same code."""

import asyncio
import math
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial

import structlog

from gateway.anthropic.endpoint import AnthropicMessages
from gateway.bases.assets import AssetCache, load_base
from gateway.bases.embedding import EmbeddingBaseCache, load_embedding_base
from gateway.bases.fetcher import BaseFetcher
from gateway.bases.shelf import BaseShelf
from gateway.bases.source import fetch_base
from gateway.bases.threads import PromptThreads
from gateway.directory import Directory
from gateway.dispatch.dispatcher import GatewayDispatcher
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.routers import RouterLinks
from gateway.embedding.embedders import Embedders
from gateway.endpoints.azure import AzurePaths
from gateway.endpoints.completer import Completer
from gateway.endpoints.completions import CompletionTask
from gateway.endpoints.copies import spare_work
from gateway.endpoints.embeddings import Embeddings
from gateway.endpoints.feedback import FeedbackIntake
from gateway.endpoints.guards import GuardBoard
from gateway.endpoints.models import Models
from gateway.endpoints.moderations import Judging
from gateway.endpoints.openapi import describe
from gateway.endpoints.reply import ReplyWriter
from gateway.endpoints.texts import Texts
from gateway.endpoints.tokenize import Tokenizing
from gateway.front import PublicServer
from gateway.guard.making import make_judges
from gateway.limits.budgets import BudgetChecks
from gateway.limits.limiter import Limiter
from gateway.limits.valkey import ValkeyClient
from gateway.metrics import GatewayMetrics
from gateway.model_pools import PoolChooser, WakeablePools
from gateway.objectives import objectives_of
from gateway.pool_board import PoolBoard
from gateway.rollouts.confirm import ConfirmationSender
from gateway.rollouts.decided import Decided
from gateway.rollouts.open_requests import OpenRequests
from gateway.server.answer_counts import AnswerCounts
from gateway.server.loop_lag import LoopLag
from gateway.server.probes import Probes
from gateway.server.routes import Routes
from gateway.server.runner import bound_socket
from gateway.settings import GatewaySettings
from gateway.stateful import StatefulApis
from gateway.texts.shipping import TextShipping, is_over
from sluice.errors import RejectedError
from sluice.events import REQUESTS_TOPIC, TEXTS_TOPIC, EventProducer
from sluice.lifecycle import run_every
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as control

log = structlog.get_logger(__name__)

_CERTIFICATE_POLL_S = 5.0
_READY_POLL_S = 0.02
_TEXTS_S = 2.0  # seconds to flush redacted texts at shutdown, before usage events are flushed
_RESPONSES_S = 3.0  # seconds to write the last stored responses to the control plane at shutdown
_TEXTS_MAX = 128  # maximum number of redacted texts in memory, each of up to some hundred kilobytes
_RELOAD_S = 2.0  # seconds between two attempts to load the bases whose load has failed
_AZURE_TAILS = ("chat/completions", "completions", "embeddings", "responses")


class Gateway:
    """One running worker. `running_gateway` is the context manager that starts and stops it."""

    def __init__(self, settings: GatewaySettings, events: EventProducer) -> None:
        """Create all parts of the worker without connections. The producer `events` is open."""
        self.settings, self.metrics = settings, GatewayMetrics(objectives_of(settings))
        self.counts = AnswerCounts(self.metrics, log_every=settings.log_every)
        self.watcher = ControlWatcher(
            settings.control_address,
            control.ROLE_GATEWAY,
            settings.instance_id,
            snapshot_file=settings.state_dir / "control.snapshot",
        )
        self.bases, self.prompt_threads = self._make_fetcher(), (threads := PromptThreads())
        find, want = self.bases.find, self.bases.want
        self.assets = AssetCache(find, partial(load_base, threads=threads), want)
        load = partial(load_embedding_base, threads=threads)
        self.embedding_bases = EmbeddingBaseCache(find, load, want)
        self.directory = Directory(self.watcher.state, self.assets.has)
        self.lag = LoopLag(self.metrics.loop_lag.observe)
        self.pace = AttemptPace(self.lag)
        told, chosen = events.put_on_disk, self.metrics.pool_chosen
        self.links = RouterLinks(
            self.directory, settings.instance_id, self.pace, events.emit, told, chosen
        )
        self.embedders = Embedders(self.watcher.state)
        self.judges = make_judges(settings.classifiers, self.metrics.classifier_texts)
        self.valkey = ValkeyClient(
            settings.valkey_url.get_secret_value(), deadline_s=settings.limit_deadline_s
        )
        self.limiter = Limiter(
            self.valkey,
            local_share=settings.limit_local_share,
            clock=asyncio.get_running_loop().time,
            require_budget=BudgetChecks(self.watcher.state).require,
        )
        self.dispatcher, self.events = GatewayDispatcher(self.links), events
        self.decided, self.open_requests = Decided(self.metrics), OpenRequests()
        self.confirmations = ConfirmationSender(
            settings.control_address,
            settings.instance_id,
            self.watcher.state,
            self.open_requests,
            self._missing_bases,
        )
        self.spare, self.scores, self.copies = spare_work(
            tasks_max=settings.copies_max,
            assets=self.assets,
            links=self.links,
            open_requests=self.open_requests,
            metrics=self.metrics,
            emit=events.emit,
            gateway_id=settings.instance_id,
        )
        self.text_shipping = _text_shipping(settings, events)
        self.stateful = StatefulApis(settings, self.counts, events.emit, self.watcher.state)
        self.texts = Texts(self.text_shipping.ship, self.metrics)
        self._changed, self.is_draining, self._is_stopped = asyncio.Event(), False, False
        self.http, self._tls, self._http2 = PublicServer(settings, self.routes(), self.counts).parts
        self.watcher.before_snapshot(self.directory.prepare)
        self.watcher.on_change(self._follow)
        self._follow_metrics()

    def not_ready_because(self) -> str:
        """Return the reason why requests cannot be served now, or empty if they can be served."""
        if self.is_draining:
            return "the server is stopping"
        if self.watcher.age_s() == float("inf"):
            return "nothing is known from the control plane yet"
        if self.links.up or self.embedders.usable:
            return ""
        return "no router is connected, and no replica that makes embeddings"

    def routes(self) -> Routes:
        """Return the handlers by path."""
        completer = Completer(
            directory=self.directory,
            assets=self.assets,
            limiter=self.limiter,
            dispatcher=self.dispatcher,
            replies=ReplyWriter(
                self.dispatcher,
                itl=self.metrics.itl,
                pace=self.pace,
                keep_alive_s=self.settings.keep_alive_s,
                gateway_id=self.settings.instance_id,
            ),
            metrics=self.metrics,
            emit=self.events.emit,
            gateway_id=self.settings.instance_id,
            open_requests=self.open_requests,
            decided=self.decided,
            copies=self.copies,
            scores=self.scores,
            texts=self.texts,
            guards=GuardBoard(self.metrics.guard_matches, self.judges),
            auto=self.stateful.auto_board(self.directory, self.links.views),
            pools=self._pool_chooser(),
        )
        embeddings = Embeddings(
            directory=self.directory,
            bases=self.embedding_bases,
            embedders=self.embedders,
            limiter=self.limiter,
            metrics=self.metrics,
            emit=self.events.emit,
            gateway_id=self.settings.instance_id,
            decided=self.decided,
        )
        tokenizing = Tokenizing(
            directory=self.directory,
            assets=self.assets,
            embedding_bases=self.embedding_bases,
            limiter=self.limiter,
        )
        routes, pools = Routes(), PoolBoard(self.watcher.state, self.links, self.embedders)
        models = Models(directory=self.directory, pools=pools)
        routes.add("POST", CompletionTask.endpoint, partial(completer.handle, CompletionTask))
        AnthropicMessages(self.directory, completer, tokenizing).add_to(routes)
        self.stateful.add_to(routes, self.directory, completer, self.assets, self.limiter)
        self._add_feedback(routes)
        routes.add("POST", "/v1/embeddings", embeddings.handle)
        Judging(embeddings, self.judges).add_to(routes)
        routes.add("POST", "/v1/tokenize", tokenizing.tokenize)
        routes.add("POST", "/v1/detokenize", tokenizing.detokenize)
        routes.add("GET", "/v1/models", models.list_all)
        routes.add("GET", "/v1/models/*", models.get_one)
        self._add_probes(routes)
        if self.settings.azure_paths:
            handlers = {tail: routes.find(f"/v1/{tail}").handler("POST") for tail in _AZURE_TAILS}
            AzurePaths(handlers).add_to(routes)
        return routes

    def _pool_chooser(self) -> PoolChooser:
        can_wake = WakeablePools(self.watcher.state).has
        count = self.metrics.pool_chosen
        return PoolChooser(self.links.wait_ms, self.assets.has, count, can_wake)

    def _add_feedback(self, routes: Routes) -> None:
        """Add the path that receives feedback on answers."""
        emit, gateway_id = self.events.emit, self.settings.instance_id
        feedback = FeedbackIntake(self.directory, self.limiter, emit, gateway_id)
        routes.add("POST", "/v1/feedback", feedback.take)

    def _add_probes(self, routes: Routes) -> None:
        """Add the paths that need no key."""
        routes.add("GET", "/openapi.json", describe)
        probes = self.probes(is_public=True)
        routes.add("GET", "/healthz", probes.health, is_open_when_full=True)
        routes.add("GET", "/readyz", probes.ready, is_open_when_full=True)
        routes.add("GET", "/health", probes.ready, is_open_when_full=True)
        routes.add("GET", "/version", probes.version)
        if self.settings.ops_address is None or self.settings.public_metrics:
            routes.add("GET", "/metrics", probes.metrics, is_open_when_full=True)

    def probes(self, *, is_public: bool = False) -> Probes:
        """Return the handlers of probes and metrics, for the operators' or the public address."""

        async def read_metrics() -> bytes:
            return self.metrics.public_page() if is_public else self.metrics.page()

        return Probes(read_metrics=read_metrics, not_ready_because=self.not_ready_because)

    async def start(self, sock: socket.socket | None) -> None:
        """Accept connections on the given bound socket, or else on a new one at `http_address`."""
        settings = self.settings
        await self.http.start(
            sock or bound_socket(settings.host, settings.port),
            self._tls.context if self._tls is not None else None,
        )
        log.info("gateway_started", address=settings.http_address)

    def reload_certificate(self) -> None:
        """Use the certificate from its files for new connections, if the files have changed."""
        if self._tls is not None:
            self._tls.reload_changed()

    async def follow_certificate(self) -> None:
        """Reload the certificate whenever its files change, until cancelled."""
        await run_every(
            _CERTIFICATE_POLL_S,
            self._reload,
            name="certificate",
            expected=(),
            step_timeout_s=_CERTIFICATE_POLL_S,
        )

    async def wait_ready(self, timeout_s: float, stop: asyncio.Event) -> bool:
        """Wait until requests can be served, `timeout_s` has passed, or `stop` is set.

        Returns:
            False if `stop` is set and requests cannot be served. Otherwise True, also after
                `timeout_s`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.not_ready_because() and not stop.is_set():  # noqa: ASYNC110 - many
                    await asyncio.sleep(_READY_POLL_S)
        return not (stop.is_set() and self.not_ready_because())

    async def stop(self, *, is_replaced: bool = False) -> None:
        """Stop the worker. Requests and streams that end in time are completed.

        The worker serves new requests until it closes its socket. Open connections may send
        requests for another `idle_grace_s`, and each answer then closes its connection. After that,
        running requests may last for `drain_s`, and then an error event ends them. A second call
        has no effect.

        Args:
            is_replaced: Whether another worker accepts at the same socket. If so, /readyz does not
                report the stop. Open connections are served as long as this worker has requests,
                at most for another `drain_s`.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        self.http.say_goodbye()
        self.spare.stop()
        if not is_replaced:
            self.is_draining = True
            if self.http.is_accepting:  # else no load balancer sends clients here
                await asyncio.sleep(self.settings.unready_s)
        self.http.stop_accepting()
        self.stateful.sockets.drain()
        log.info("drain_started", open=self.dispatcher.open)
        await self.http.wait_goodbyes(self.settings.idle_grace_s)
        drain_s = self.settings.drain_s
        if is_replaced:
            await self.http.wait_idle(drain_s)
        *left, _ = await asyncio.gather(
            self.dispatcher.drain(drain_s),
            self.embedders.drain(drain_s),
            self.http.wait_idle(drain_s),  # also answers requests whose body is arriving
        )
        if any(left):
            log.warning("drain_cut", open=sum(left))
        self.dispatcher.stop_all()
        self.embedders.stop_all()
        self.prompt_threads.stop_all()
        await self.stateful.stop()
        await self.http.close()
        await self.stateful.flush(_RESPONSES_S)
        await self.texts.flush(_TEXTS_S)
        await self.limiter.flush()
        await asyncio.to_thread(self.prompt_threads.close)

    async def _reload(self) -> None:
        self.reload_certificate()

    def _follow(self, response: control.WatchResponse) -> None:
        self.directory.update(response)
        self.links.update()
        self.confirmations.follow(response)
        if response.is_snapshot or response.upserts.replicas or response.removals.replicas:
            self.embedders.update()
        if response.is_snapshot or response.removals.bases:
            self.assets.keep_only(set(self.watcher.state.bases))
            self.embedding_bases.keep_only(set(self.watcher.state.bases))
            self.bases.keep_only(set(self.watcher.state.bases))
        self._changed.set()

    def _make_fetcher(self) -> BaseFetcher:
        settings = self.settings
        return BaseFetcher(
            settings.artifacts_dir,
            BaseShelf(settings.state_dir / "bases", settings.bases_bytes_max),
            partial(fetch_base, settings.control_address),
            on_arrival=self._note_base,
            count=lambda result: self.metrics.base_fetches.labels(result).inc(),
        )

    def _note_base(self, digest: str) -> None:
        self.assets.refresh(digest)
        self.embedding_bases.refresh(digest)
        self._changed.set()

    async def preload(self) -> None:
        """Load the bases of all models before a request needs them, until cancelled."""
        missing: set[tuple[bool, str]] = set()
        while True:
            wanted = missing
            with suppress(TimeoutError):  # polling also finds a directory copied by hand
                async with asyncio.timeout(_RELOAD_S if missing else None):
                    await self._changed.wait()
                    self._changed.clear()
                    served = self.directory.served()
                    wanted = {(self.directory.generates_text(m), m.base_digest) for m in served}
            missing = {it for it in sorted(wanted) if not await self._load(*it)}
            self.confirmations.refresh()

    def _missing_bases(self) -> set[str]:
        """Return the bases of releases in rollout whose tokenizers are not loaded here yet."""
        coming = {model.base_digest for model in self.directory.canaries()}
        return {digest for digest in coming if not self.assets.has(digest)}

    async def _load(self, is_chat: bool, digest: str) -> bool:
        try:
            await (self.assets if is_chat else self.embedding_bases).get(digest)
        except RejectedError:  # the cache has logged the reason
            return False
        return True

    def _follow_metrics(self) -> None:
        http2 = self._http2
        self.metrics.follow(
            {
                "gateway_open_generations": lambda: self.dispatcher.open,
                "gateway_open_copies": lambda: self.spare.open,
                "gateway_open_connections": lambda: self.http.server.open_connections,
                "gateway_open_http2_connections": lambda: http2.open_connections if http2 else 0,
                "gateway_open_http2_streams": lambda: http2.open_streams if http2 else 0,
                "gateway_http2_floods": lambda: http2.floods if http2 else 0,
                "gateway_open_sockets": lambda: self.stateful.sockets.open,
                "gateway_open_background_responses": lambda: self.stateful.background.open,
                "gateway_body_buffer_bytes": lambda: self.http.server.body_bytes,
                "gateway_retries_refused": lambda: self.dispatcher.retries_refused,
                "gateway_routers_up": lambda: self.links.up,
                "gateway_embedders_trusted": lambda: self.embedders.usable,
                "gateway_open_embeddings": lambda: self.embedders.open,
                "gateway_control_age_seconds": self.watcher.age_s,
                "gateway_bases_missing": lambda: self.bases.wanted,
                "gateway_valkey_up": lambda: self.valkey.is_connected,
                "gateway_limit_local_decisions": lambda: self.limiter.local_decisions,
                "gateway_limit_lost_settlements": lambda: self.limiter.lost_settlements,
                "gateway_events_dropped": lambda: self.events.stats.dropped,
                "gateway_event_spool_bytes": lambda: self.events.stats.spool_bytes,
                "gateway_text_events_dropped": lambda: (
                    self.text_shipping.dropped + self.events.stats.evicted
                ),
                "gateway_responses_kept": lambda: self.stateful.responses.can_keep,
                "gateway_responses_waiting": lambda: self.stateful.responses.waiting,
                "gateway_text_spool_bytes": lambda: self.text_shipping.spool_bytes,
                "gateway_certificate_stale": lambda: self._tls is not None and self._tls.is_stale,
                "gateway_certificate_expiry_seconds": lambda: (
                    math.inf if self._tls is None else self._tls.left_s(time.time())
                ),
            }
        )


def _text_shipping(settings: GatewaySettings, events: EventProducer) -> TextShipping:
    """Return the sender of redacted texts. It spools no texts while usage events need the disk."""
    directory = settings.state_dir / "texts"
    make = partial(
        EventProducer,
        settings.kafka_bootstrap,
        TEXTS_TOPIC,
        spool_directory=directory,
        spool_max_bytes=settings.text_spool_bytes_max,
        queue_max=_TEXTS_MAX,
        may_spool=lambda: not events.is_spool_tight,
        is_over=is_over,
    )
    return TextShipping(make, directory)


@asynccontextmanager
async def running_gateway(
    settings: GatewaySettings,
    sock: socket.socket | None = None,
    *,
    ready_wait_s: float = 0.0,
    stop: asyncio.Event | None = None,
) -> AsyncGenerator[Gateway]:
    """Run a worker, which accepts connections inside the block and stops when the block ends.

    Args:
        settings: Settings of this worker.
        sock: Bound socket to listen on instead of `http_address`.
        ready_wait_s: Seconds to wait until requests can be served. After that time, connections
            are accepted even if requests cannot be served.
        stop: Event that ends the wait. If requests cannot be served then, the worker accepts no
            connection. Other processes that share the socket accept the waiting connections.
    """
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    events = EventProducer(
        settings.kafka_bootstrap,
        REQUESTS_TOPIC,
        spool_directory=settings.state_dir / "events",
        lesser_spool=settings.state_dir / "texts",
    )
    try:
        gateway = Gateway(settings, events)
        gateway.watcher.load_from_disk()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(gateway.watcher.run()),
                tasks.create_task(gateway.links.run()),
                tasks.create_task(gateway.confirmations.run()),
                tasks.create_task(gateway.spare.run()),
                tasks.create_task(gateway.texts.run()),
                tasks.create_task(gateway.text_shipping.run()),
                tasks.create_task(gateway.embedders.run()),
                tasks.create_task(gateway.judges.run()),
                tasks.create_task(gateway.valkey.run()),
                tasks.create_task(gateway.stateful.run()),
                tasks.create_task(gateway.bases.run()),
                tasks.create_task(gateway.preload()),
                tasks.create_task(gateway.lag.run()),
                tasks.create_task(gateway.follow_certificate()),
            ]
            await gateway.watcher.wait_synced(1.0)
            is_wanted = await gateway.wait_ready(ready_wait_s, stop or asyncio.Event())
            try:
                if is_wanted:
                    await gateway.start(sock)
                yield gateway
            finally:
                await gateway.stop()
                for task in background:
                    task.cancel()
                await gateway.text_shipping.close(_TEXTS_S)
    finally:
        await asyncio.to_thread(events.close, settings.flush_s)
        log.info("gateway_stopped")
