"""The composition root, which builds all parts and serves until a stop signal."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version as package_version
from types import MappingProxyType
from typing import Any

import structlog
from aiohttp import web
from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access import session_repository
from control_plane.adapters.routes import AdapterRoutes
from control_plane.admin.audit import AuditRoutes
from control_plane.admin.keys import ADMIN_KEYS
from control_plane.alerts import repository as alerts
from control_plane.alerts.evaluator import RuleEvaluator
from control_plane.alerts.pages import TargetsError
from control_plane.alerts.receivers import ReceiversError, read_receivers
from control_plane.alerts.routes import AlertRoutes
from control_plane.alerts.rules import RulesError
from control_plane.alerts.service import AlertService
from control_plane.artifacts.model import Bounds
from control_plane.artifacts.rank_limits import RankChecks, rank_checks
from control_plane.artifacts.routes import ArtifactRoutes
from control_plane.artifacts.service import Artifacts
from control_plane.artifacts.sources import Allowed
from control_plane.artifacts.worker import HAS_WORK as UPLOADS_WAIT
from control_plane.audit.repository import prune_answers, prune_audit
from control_plane.auto.routes import AUTO_POLICIES
from control_plane.batches import repository as batch_rows
from control_plane.batches.loop import BatchLoop
from control_plane.batches.repository import prune_batches
from control_plane.batches.service import BatchService
from control_plane.budgets import feed as budget_feed
from control_plane.budgets import repository as budget_rows
from control_plane.budgets.routes import INTERVAL_S, BudgetRoutes
from control_plane.budgets.service import BudgetService
from control_plane.console.service import open_console
from control_plane.content.retention import ContentRetention
from control_plane.content.routes import ContentKeyRoutes
from control_plane.database import Database
from control_plane.distribution.model import PlannerLimits
from control_plane.distribution.service import LIMITS, DistributionService
from control_plane.distribution.text_files import TextFiles
from control_plane.fleet import preparation
from control_plane.fleet.agents import AgentService
from control_plane.fleet.hours import Clock
from control_plane.fleet.hours_repository import prune_intervals
from control_plane.fleet.hours_routes import HoursRoutes
from control_plane.fleet.routes import FleetRoutes
from control_plane.fleet.service import FleetLoop
from control_plane.guard.routes import GUARD_SETS
from control_plane.http.keys import KeyRoutes
from control_plane.http.openapi import document
from control_plane.http.resources import ResourceRoutes
from control_plane.http.routes import AdminRoute
from control_plane.http.server import make_application, make_runner
from control_plane.metrics import ControlPlaneMetrics
from control_plane.models import routes as models
from control_plane.quality import repository as golden_records
from control_plane.quality.base_prompts import BasePrompts
from control_plane.quality.ejection_routes import EjectionRoutes
from control_plane.quality.repository import holdback, set_canary
from control_plane.quality.routes import QualityRoutes
from control_plane.quality.service import Quality
from control_plane.quality.verdicts import ReplacementBudget
from control_plane.records.service import RecordService
from control_plane.responses.service import StateService
from control_plane.rollouts import repository as rollout_rows
from control_plane.rollouts import trials
from control_plane.rollouts.confirmations import Confirmations
from control_plane.rollouts.feed import open_feed
from control_plane.rollouts.plan_routes import PlanRoutes
from control_plane.rollouts.rollback_routes import RollbackRoutes
from control_plane.rollouts.routes import RolloutRoutes
from control_plane.rollouts.service import Rollouts
from control_plane.scaling import repository as scaling_rows
from control_plane.scaling.actuators import Actuator, ActuatorsError, read_actuators
from control_plane.scaling.asking import NodeAsking
from control_plane.scaling.consolidation import Consolidation
from control_plane.scaling.day_routes import DayRoutes
from control_plane.scaling.moving import Moving
from control_plane.scaling.prefetching import Prefetching
from control_plane.scaling.replay_routes import ReplayRoutes
from control_plane.scaling.routes import INTERVAL_S as SCALING_INTERVAL_S
from control_plane.scaling.routes import ScalingRoutes
from control_plane.scaling.service import Scaling
from control_plane.settings import Settings
from control_plane.telemetry_reader import NO_TELEMETRY, TelemetryReader, open_reader
from control_plane.tenants import routes as tenants
from control_plane.texts.routes import TextRoutes
from control_plane.texts.store import NO_TEXTS, TextStore, open_store
from control_plane.tools.routes import SERVER_TOOLS
from control_plane.watch.feed import Feed
from control_plane.watch.service import WatchService
from control_plane.work_poll import WorkPoll
from sluice import channels
from sluice.addresses import host_and_port
from sluice.certificates import refusal_of, server_tls
from sluice.identity import Service
from sluice.lifecycle import stop_signals
from sluice.sealing import Sealer
from sluice.shared_secret import ours as shared_secret
from sluice.stored_content import SEALED_FOR
from sluice.wire.agent.v1.agent_pb2_grpc import add_AgentServiceServicer_to_server
from sluice.wire.distribution.v1.distribution_pb2_grpc import (
    add_DistributionServiceServicer_to_server,
)
from sluice.wire.state.v1.state_pb2_grpc import (
    add_BatchServiceServicer_to_server,
    add_RecordServiceServicer_to_server,
    add_StateServiceServicer_to_server,
)

log = structlog.get_logger(__name__)

_GRPC_STOP_S = 1.0
# A frozen peer keeps its connection open. Pings detect within about 5 s that a peer does not
# answer.
_GRPC_OPTIONS = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    # the setting that closes the connection (default 60 s in grpcio 1.85)
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A port in use is an error, because a second server must not share the port.
    ("grpc.so_reuseport", 0),
)


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    async with stop_signals() as stop, serve(settings):
        log.info("control_plane_started", grpc=settings.grpc_address, http=settings.http_address)
        await stop.wait()
    log.info("control_plane_stopped")


@asynccontextmanager
async def serve(settings: Settings) -> AsyncGenerator[None]:
    """Build and run all parts while the context is open."""
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url.get_secret_value())
        stack.push_async_callback(database.close)
        feed, metrics = Feed(database), ControlPlaneMetrics()
        budget = ReplacementBudget(settings.quality_pool_hour_max, settings.quality_node_day_max)
        clock, held = Clock(metrics.count_replica_seconds), partial(holdback, budget=budget)
        fleet = FleetLoop(database, feed, _prunes(settings), metrics.show_unplaced, clock, held)
        poll = WorkPoll(database, work_conditions())
        rollouts = await _rollouts(stack, database, settings, metrics, poll)
        budgets = await _budgets(stack, database, settings, metrics, poll)
        background = await stack.enter_async_context(asyncio.TaskGroup())
        artifacts = _artifacts(stack, database, settings, poll)
        options = (_links(settings), artifacts.read_chunk, poll.of("scaling"))
        distribution = DistributionService(database, feed, metrics, *options)
        base_prompts = _base_prompts(database, feed, artifacts)
        quality = Quality(
            database, feed, metrics.quality, budget, token_ids=lambda: base_prompts.token_ids
        )
        actuators = _actuators(settings)
        scaling = _scaling(database, settings, metrics, actuators, poll)
        console = await stack.enter_async_context(open_console(database, settings))
        parts = (
            *(feed, fleet, artifacts, distribution, rollouts, quality, base_prompts, budgets),
            *(poll, scaling, console, *_stored(database, settings, poll)),
            *(_alerts(database, settings, metrics, poll), _rules(database, settings, metrics)),
        )
        for work in parts:
            stack.callback(background.create_task(work.run()).cancel)
        watch = _watch(feed, fleet, metrics, Confirmations(database), scaling, quality)
        agents = AgentService(database, feed, fleet, quality, trials)
        state = StateService(database), RecordService(database), BatchService(database)
        await _serve_grpc(stack, settings.grpc_address, watch, agents, distribution, *state)
        routes = [
            *ArtifactRoutes(database, artifacts).routes(),
            *admin_routes(
                database,
                rollouts.wake,
                rollouts.unreadable,
                budget_interval_s=settings.budget_interval_s,
                scaling_interval_s=settings.scaling_interval_s,
                actuators=actuators.keys(),
                texts=await _texts(stack, settings),
                ranks=rank_checks(artifacts.read_chunk),
                telemetry=await _telemetry(stack, settings),
            ),
        ]
        routes += _operations(feed, metrics, document(routes, package_version("sluice")))
        routes += console.routes()
        bootstrap = settings.admin_key_sha256
        application = make_application(routes, database, bootstrap, metrics.count_request)
        console.end_with(application)
        runner = make_runner(application)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        where = host_and_port(settings.http_address)
        await web.TCPSite(runner, *where, ssl_context=server_tls(is_required=False)).start()
        yield


def work_conditions() -> dict[str, ColumnElement[bool]]:
    """Return the conditions under which the periodic loops have work, by the loop's name."""
    return {
        "alerts": alerts.work_condition(),
        "batches": batch_rows.HAS_WORK,
        "budgets": budget_rows.HAS_WORK,
        "rollouts": rollout_rows.HAS_WORK,
        "scaling": scaling_rows.HAS_WORK,
        "uploads": UPLOADS_WAIT,
    }


def _watch(
    feed: Feed,
    fleet: FleetLoop,
    metrics: ControlPlaneMetrics,
    confirmations: Confirmations,
    scaling: Scaling,
    quality: Quality,
) -> WatchService:
    presence = fleet.presence
    heard = (confirmations.confirm, scaling.report, quality.accuse)
    return WatchService(feed, presence.present, presence.leave, metrics.count_watcher, *heard)


def _base_prompts(database: Database, feed: Feed, artifacts: Artifacts) -> BasePrompts:
    async def write_canary(base: str, token_ids: tuple[int, ...]) -> None:
        await database.run(lambda connection: set_canary(connection, base, token_ids))

    return BasePrompts(feed, TextFiles(database, artifacts.read_chunk).read, write_canary)


def _prunes(settings: Settings) -> tuple[Callable[[AsyncConnection], Awaitable[None]], ...]:
    return (
        prune_answers,
        session_repository.prune,
        partial(prune_audit, kept_days=settings.audit_days),
        partial(alerts.prune, kept_days=settings.alert_days),
        partial(prune_intervals, kept_days=settings.replica_hours_days),
        partial(prune_batches, kept_days=settings.response_days),
    )


def _stored(
    database: Database, settings: Settings, poll: WorkPoll
) -> tuple[BatchLoop, ContentRetention]:
    """Return the loops that process and expire the content that tenants have stored."""
    secret, days = shared_secret(), settings.response_days
    retention = ContentRetention(database, Sealer(secret, SEALED_FOR), kept_days=days)
    return BatchLoop(database, secret, poll.of("batches")), retention


def admin_routes(
    database: Database,
    wake_rollouts: Callable[[], None] = lambda: None,
    unread_rollouts: Mapping[str, str] = MappingProxyType({}),
    *,
    budget_interval_s: float = INTERVAL_S,
    scaling_interval_s: float = SCALING_INTERVAL_S,
    actuators: Collection[str] = (),
    texts: TextStore = NO_TEXTS,
    ranks: RankChecks = RankChecks(),  # noqa: B008 - immutable
    telemetry: TelemetryReader = NO_TELEMETRY,
) -> list[AdminRoute]:
    """Return the routes of the admin REST for all domains that need only the database."""
    return [
        *RolloutRoutes(database, wake_rollouts, unread_rollouts).routes(),
        *PlanRoutes(database).routes(),
        *RollbackRoutes(database).routes(),
        *QualityRoutes(database).routes(),
        *EjectionRoutes(database).routes(),
        *AlertRoutes(database).routes(),
        *AdapterRoutes(database).routes(),
        *BudgetRoutes(database, budget_interval_s).routes(),
        *TextRoutes(database, texts).routes(),
        *ContentKeyRoutes(database).routes(),
        *ResourceRoutes(database, GUARD_SETS).routes(),
        *ResourceRoutes(database, SERVER_TOOLS).routes(),
        *ResourceRoutes(database, AUTO_POLICIES).routes(),
        *tenants.routes(database),
        *models.routes(database, ranks.model, ranks.model_pools),
        *FleetRoutes(database, ranks.pool).routes(),
        *ScalingRoutes(database, scaling_interval_s, actuators).routes(),
        *ReplayRoutes(database, scaling_interval_s, telemetry).routes(),
        *DayRoutes(database, telemetry).routes(),
        *HoursRoutes(database).routes(),
        *KeyRoutes(database, ADMIN_KEYS).routes(),
        *AuditRoutes(database).routes(),
    ]


async def _telemetry(stack: AsyncExitStack, settings: Settings) -> TelemetryReader:
    url, key = settings.telemetry_url, settings.telemetry_key.get_secret_value()
    return await stack.enter_async_context(open_reader(url, key))


async def _rollouts(
    stack: AsyncExitStack,
    database: Database,
    settings: Settings,
    metrics: ControlPlaneMetrics,
    poll: WorkPoll,
) -> Rollouts:
    url, key = settings.telemetry_url, settings.telemetry_key.get_secret_value()
    window_ms = round(settings.rollout_window_s * 1000)
    evidence = await stack.enter_async_context(open_feed(url, key, window_ms=window_ms))
    shown = (metrics.show_rollouts, metrics.count_rollback)
    may_have_work = poll.of("rollouts")
    return Rollouts(database, evidence, preparation, golden_records, *shown, may_have_work)


async def _budgets(
    stack: AsyncExitStack,
    database: Database,
    settings: Settings,
    metrics: ControlPlaneMetrics,
    poll: WorkPoll,
) -> BudgetService:
    url, key = settings.telemetry_url, settings.telemetry_key.get_secret_value()
    ledger = await stack.enter_async_context(budget_feed.open_feed(url, key))
    show, interval_s = metrics.show_budgets, settings.budget_interval_s
    return BudgetService(database, ledger, show, interval_s, may_have_work=poll.of("budgets"))


def _alerts(
    database: Database, settings: Settings, metrics: ControlPlaneMetrics, poll: WorkPoll
) -> AlertService:
    try:
        receivers = read_receivers(settings.alert_receivers)
    except ReceiversError as error:
        raise OSError(f"CONTROL_PLANE__ALERT_RECEIVERS: {error}") from None
    count, may_have_work = metrics.count_notification, poll.of("alerts")
    return AlertService(database, receivers, count, may_have_work=may_have_work)


def _rules(database: Database, settings: Settings, metrics: ControlPlaneMetrics) -> RuleEvaluator:
    rules, interval_s = settings.alert_rules, settings.alert_interval_s
    runbooks = settings.alert_runbooks.rstrip("/")
    try:
        return RuleEvaluator(
            *(database, settings.alert_targets, rules, interval_s, metrics.show_rules),
            external={"runbooks": runbooks} if runbooks else {},
        )
    except TargetsError as error:
        raise OSError(f"CONTROL_PLANE__ALERT_TARGETS: {error}") from None
    except RulesError as error:
        raise OSError(f"CONTROL_PLANE__ALERT_RULES: {error}") from None


def _actuators(settings: Settings) -> dict[str, Actuator]:
    try:
        return read_actuators(settings.scaling_actuators)
    except ActuatorsError as error:
        raise OSError(f"CONTROL_PLANE__SCALING_ACTUATORS: {error}") from None


def _scaling(
    database: Database,
    settings: Settings,
    metrics: ControlPlaneMetrics,
    actuators: Mapping[str, Actuator],
    poll: WorkPoll,
) -> Scaling:
    asking = NodeAsking(actuators, metrics.count_ask, metrics.show_nodes)
    show, count_late = metrics.show_scaling, metrics.count_late_pool
    interval_s, may_have_work = settings.scaling_interval_s, poll.of("scaling")
    mode = Consolidation(settings.scaling_consolidation)
    moving = Moving(actuators, mode, settings.scaling_consolidation_hold_s)
    counts = (count_late, asking, moving, metrics.count_move)
    prefetching = Prefetching(settings.scaling_prefetch_bases)
    return Scaling(database, interval_s, show, *counts, prefetching, may_have_work)


async def _texts(stack: AsyncExitStack, settings: Settings) -> TextStore:
    url, key = settings.telemetry_url, settings.telemetry_key.get_secret_value()
    return await stack.enter_async_context(open_store(url, key))


def _links(settings: Settings) -> PlannerLimits:
    return replace(
        LIMITS,
        up_bytes_s=settings.distribution_node_bytes_per_second,
        down_bytes_s=settings.distribution_node_bytes_per_second,
        store_bytes_s=settings.distribution_store_bytes_per_second,
    )


def _artifacts(
    stack: AsyncExitStack, database: Database, settings: Settings, poll: WorkPoll
) -> Artifacts:
    bounds = Bounds(
        rank_max=settings.artifact_rank_max,
        adapter_bytes_max=settings.artifact_adapter_bytes_max,
        tenant_bytes_max=settings.artifact_tenant_bytes_max,
        are_signed=settings.artifact_signatures_required,
    )
    allowed = Allowed(
        roots=_listed(settings.artifact_import_roots),
        hosts=_listed(settings.artifact_import_hosts),
        buckets=_listed(settings.artifact_import_buckets),
    )
    url, grace_s = settings.artifact_store_url, settings.artifact_grace_s
    artifacts = Artifacts(database, url, bounds, allowed, grace_s, poll.of("uploads"))
    stack.callback(artifacts.close)
    return artifacts


def _listed(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


async def _serve_grpc(
    stack: AsyncExitStack,
    address: str,
    watch: WatchService,
    agents: AgentService,
    distribution: DistributionService,
    state: StateService,
    records: RecordService,
    batches: BatchService,
) -> None:
    server = channels.server(_GRPC_OPTIONS)
    server.add_generic_rpc_handlers((watch.handler(),))
    add_AgentServiceServicer_to_server(agents, server)
    add_DistributionServiceServicer_to_server(distribution, server)
    add_StateServiceServicer_to_server(state, server)
    add_RecordServiceServicer_to_server(records, server)
    add_BatchServiceServicer_to_server(batches, server)
    try:
        channels.add_port(server, address)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}: is the port taken?") from error
    await server.start()
    stack.push_async_callback(server.stop, _GRPC_STOP_S)


def _operations(
    feed: Feed, metrics: ControlPlaneMetrics, description: dict[str, Any]
) -> list[AdminRoute]:
    """Return the routes of health, metrics and the REST's description, which need no key."""

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        """Report ready once a state was loaded, even while PostgreSQL is down."""
        body = {
            "status": "ok" if feed.is_loaded else "starting",
            "database": "up" if feed.is_database_up else "down",
            "version": feed.state.version,
        }
        return web.json_response(body, status=200 if feed.is_loaded else 503)

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response(description)

    async def show_metrics(request: web.Request) -> web.Response:
        if why := refusal_of(request.transport, Service.METRICS):
            return web.Response(status=403, text=f"{why}\n")
        body = metrics.render(feed)
        return web.Response(body=body, headers={"Content-Type": metrics.content_type})

    return [
        AdminRoute("GET", "/healthz", healthz, None),
        AdminRoute("GET", "/readyz", readyz, None),
        AdminRoute("GET", "/openapi.json", openapi, None),
        AdminRoute("GET", "/metrics", show_metrics, None),
    ]
