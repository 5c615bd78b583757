"""Composition root of the router, which builds, runs and drains all its parts."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import grpc.aio
import structlog

from router.accusations import Accusations
from router.canaries import CanaryAsker
from router.core.router import RouterCore
from router.core.types.config import CoreConfig
from router.demand_reports import DemandReports
from router.fleet import ReplicaAttachments, Target
from router.hub import Hub
from router.metrics import RouterMetrics
from router.pool_peers import PoolPeers
from router.pool_reports import PoolReports
from router.prefetch import Prefetch
from router.service import SERVER_OPTIONS, RouterService
from router.settings import Settings
from router.transfers import Transfers
from sluice import channels
from sluice.errors import ErrorCode, FailedError
from sluice.kserve import HostStream, call_host
from sluice.lifecycle import run_every, stop_signals
from sluice.status_http import status_server
from sluice.watch import ControlState, ControlWatcher
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine

log = structlog.get_logger(__name__)

_FLUSH_S = 2.0
_FOLLOW_S = 1.0


async def serve(settings: Settings) -> None:
    """Run the router until SIGTERM, then drain and return."""
    async with stop_signals() as stop:
        await run(settings, stop)


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Run the router until `stop` is set, then drain and return."""
    core = RouterCore(core_config(settings))
    metrics = RouterMetrics()
    hub = Hub(core, metrics, settings.instance_id)
    watcher = ControlWatcher(
        settings.control_address,
        control.ROLE_ROUTER,
        settings.instance_id,
        settings.grpc_address,
        settings.state_dir / "router-snapshot.bin",
    )
    metrics.follow(watcher.age_s, partial(_pool_of, watcher.state))
    async with AsyncExitStack() as stack:
        reports = PoolReports(hub, settings.instance_id)
        service = RouterService(hub, settings.instance_id, reports)
        server = await _start_server(service, settings.grpc_address)
        stack.push_async_callback(server.stop, None)
        await stack.enter_async_context(
            status_server(
                settings.http_address,
                is_ready=lambda: not core.is_draining and watcher.age_s() < float("inf"),
                metrics=hub.exposition,
            )
        )
        stack.callback(hub.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        fleet = _fleet(hub, tasks, settings, CanaryAsker(watcher.state))
        hub.transfer_by(Transfers(tasks, fleet.target, _open_stream, hub.transferred).start)
        prefetch = _prefetch(hub, tasks, fleet, settings)
        peers = PoolPeers(hub, tasks, reports, router_id=settings.instance_id)
        metrics.follow_peers(peers.age_s)
        watcher.on_change(lambda _: fleet.follow(watcher.state))
        watcher.on_change(lambda _: peers.follow(watcher.state))
        watcher.on_change(prefetch.on_change)
        watcher.load_from_disk()
        watching = tasks.create_task(watcher.run())
        told = (reports, _demand(hub, settings), _accusations(hub, watcher.state, settings))
        telling = [tasks.create_task(it.run()) for it in told]
        following = tasks.create_task(_follow_now_and_then(fleet, prefetch, watcher))
        log.info("router_started", instance_id=settings.instance_id, address=settings.grpc_address)
        await stop.wait()
        log.info("router_draining", live_requests=core.live_requests)
        core.drain()
        watching.cancel()
        await watcher.leave()  # the control plane can now assign the cells to another router
        await _drain(hub, settings.drain_s)
        await hub.send_last(_FLUSH_S)
        service.end()
        await hub.flush(_FLUSH_S)
        for task in (following, *telling):
            task.cancel()
        peers.stop()
        prefetch.stop()
        await fleet.stop()
        await server.stop(_FLUSH_S)
    log.info("router_stopped")


def _fleet(
    hub: Hub, tasks: asyncio.TaskGroup, settings: Settings, canaries: CanaryAsker
) -> ReplicaAttachments:
    router_id, silence_s = settings.instance_id, settings.silence_s
    return ReplicaAttachments(
        hub, tasks, _open_stream, canaries.ask, router_id=router_id, silence_s=silence_s
    )


def _prefetch(
    hub: Hub, tasks: asyncio.TaskGroup, fleet: ReplicaAttachments, settings: Settings
) -> Prefetch:
    load, held = partial(_load, fleet), hub.note_host_adapters
    prefetch = partial(Prefetch, tasks, load, held, router_id=settings.instance_id)
    return prefetch(hub.adapter_loads) if settings.plans_adapters else prefetch()


def _demand(hub: Hub, settings: Settings) -> DemandReports:
    return DemandReports(hub, settings.control_address, settings.instance_id)


def _accusations(hub: Hub, state: ControlState, settings: Settings) -> Accusations:
    accusations = Accusations(state, settings.instance_id, settings.control_address)
    hub.accuse_by(accusations.put)
    return accusations


def _pool_of(state: ControlState, cell_id: str) -> str:
    cell = state.cells.get(cell_id)
    return cell.pool_id if cell is not None else ""


def core_config(settings: Settings) -> CoreConfig:
    """Return the core's limits from the settings."""
    return CoreConfig(
        queue_requests_max=settings.queue_requests_max,
        queue_tokens_max=settings.queue_tokens_max,
        tenant_requests_max=settings.tenant_requests_max,
        tenant_tokens_max=settings.tenant_tokens_max,
        deadline_default_s=settings.deadline_default_s,
        retries_max=settings.retries_max,
        ttft_base_s=settings.ttft_base_s,
        ttft_factor=settings.ttft_factor,
        tpot_s=settings.tpot_s,
        overtake_factor=settings.overtake_factor,
        decision_sample=settings.decision_sample,
        decision_pause_s=settings.decision_pause_s,
    )


async def _start_server(service: RouterService, address: str) -> grpc.aio.Server:
    server = channels.server(SERVER_OPTIONS)
    service.add_to(server)
    try:
        channels.add_port(server, address)
    except RuntimeError as error:
        hint = f"cannot listen on {address}: is it taken? Set ROUTER__GRPC_ADDRESS"
        raise SystemExit(hint) from error
    await server.start()
    return server


def _open_stream(target: Target) -> HostStream:
    return HostStream(target.address, target.model)


async def _load(
    fleet: ReplicaAttachments, replica_id: str, digests: list[str], timeout_s: float
) -> engine.AdapterList:
    target = fleet.target(replica_id)
    if target is None:
        raise FailedError(ErrorCode.UNAVAILABLE, f"{replica_id} is not attached")
    request = engine.HostRequest(adapters=engine.Adapters(load=digests))
    return (await call_host(target.address, target.model, request, timeout_s=timeout_s)).adapters


async def _follow_now_and_then(
    fleet: ReplicaAttachments, prefetch: Prefetch, watcher: ControlWatcher
) -> None:
    async def follow() -> None:
        fleet.follow(watcher.state)
        prefetch.follow(watcher.state)

    await run_every(_FOLLOW_S, follow, name="follow", expected=(), step_timeout_s=1.0)


async def _drain(hub: Hub, drain_s: float) -> None:
    """Wait until all accepted requests have ended, and end requests that exceed the drain time."""
    if not await hub.wait_idle(drain_s):
        log.warning("drain_timed_out", live_requests=hub.core.live_requests)
        hub.core.end_all()
        hub.tick()
