"""A site whose routers and engines may end under load: everything is real, engines are `sim`."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import structlog

from gateway.app import Gateway, running_gateway
from gateway.dispatch.cell_choice import Wish
from gateway.settings import GatewaySettings
from replica.agent.replica_state import EngineSpec
from sluice.process import ChildProcess, free_port
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1.agent_pb2_grpc import AgentServiceStub
from sluice.wire.control.v1 import control_pb2 as control
from tests import sse
from tests.links import trusted_channel
from tests.support.routers import running_router
from tests.support.tritons import Triton, running_tritons

log = structlog.get_logger(__name__)

WAIT_S = 60.0
TOKENS = 150
STREAMS = 64


@asynccontextmanager
async def running_node(control_address: str, tritons: list[Triton]) -> AsyncIterator[None]:
    """An agent's reports: what is wanted of it, these Tritons already serve."""
    facts = agent.NodeFacts(cpu_count=2, memory_bytes=8 << 30, engines=["sim"])

    async def report(call) -> None:
        wanted: list[str] = []
        while True:
            observed = [
                agent.ObservedReplica(
                    replica_id=replica_id,
                    state=control.REPLICA_STATE_READY,
                    grpc_address=triton.launch.grpc_address,
                )
                for replica_id, triton in zip(wanted, tritons, strict=False)
            ]
            await call.write(agent.SyncRequest(node_id="n", facts=facts, replicas=observed))
            wanted = [replica.replica_id for replica in (await call.read()).replicas]

    async with trusted_channel(control_address) as channel:
        call = AgentServiceStub(channel).Sync()
        async with asyncio.TaskGroup() as tasks:
            reporting = tasks.create_task(report(call))
            yield
            reporting.cancel()
        call.cancel()


class Site:
    """Everything is up, and answers."""

    def __init__(
        self,
        gateway: Gateway,
        http: aiohttp.ClientSession,
        routers: dict[str, ChildProcess],
        tritons: list[Triton],
    ) -> None:
        self.gateway = gateway
        self._http = http
        self._texts: list[str] = []
        self.routers = routers
        self.tritons = tritons
        self.pause_s = 0.0  # the longest between two chunks of any stream

    def owners(self) -> dict[str, str]:
        cells = self.gateway.watcher.state.cells.values()
        return {cell.id: cell.router_id for cell in cells}

    async def streamed(self, number: int, begun: asyncio.Semaphore) -> str:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"tell me about {number}"}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        parts: list[str] = []
        last_at = time.monotonic()
        async for chunk in sse.chunks(self._http, body):
            if not parts:
                begun.release()
            else:
                self.pause_s = max(self.pause_s, time.monotonic() - last_at)
            last_at = time.monotonic()
            parts += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        return "".join(parts)

    async def many(self, disturb: Callable[[], None] | None = None) -> list[str]:
        begun = asyncio.Semaphore(0)
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(self.streamed(n, begun)) for n in range(STREAMS)]
            for _ in calls:
                await begun.acquire()
            if disturb is not None:
                disturb()
        return [call.result() for call in calls]

    async def undisturbed(self) -> list[str]:
        """What all streams say when nothing ends."""
        if not self._texts:
            self._texts = await self.many()
            assert all(self._texts)
        return self._texts


@asynccontextmanager
async def running_site(
    plane, artifacts, valkey, home: Path, *, cell_replicas_max: int, places: int
) -> AsyncIterator[Site]:
    """Run it all; the first three are fixtures of the same names.

    Args:
        plane: The control plane.
        artifacts: Of the only base.
        valkey: Where limits are counted.
        home: For everybody's state.
        cell_replicas_max: Of the pool; 0: one cell has both replicas.
        places: Of each engine.
    """
    artifacts_dir, digest, _ = artifacts
    await plane.put(f"bases/{digest}", context_tokens_max=2048)
    await plane.put("tiers/t")
    await plane.put("tenants/one", tier_id="t")
    made = await plane.admin.post("/v1/tenants/one/keys", json={})
    options = (("blocks", "4096"), ("cost_step_s", "0.02"), ("sequences_max", str(places)))
    spec = EngineSpec("sim", digest, options)
    async with AsyncExitStack() as stack:
        tritons = await stack.enter_async_context(
            running_tritons(home, {"t1": spec, "t2": spec}, artifacts_dir=artifacts_dir)
        )
        routers = {
            name: await stack.enter_async_context(running_router(name, plane.grpc_address, home))
            for name in ("one", "two")
        }
        stack.push_async_callback(_stop_all, routers)
        await stack.enter_async_context(running_node(plane.grpc_address, tritons))
        await plane.put(
            "pools/pool",
            base_digest=digest,
            engine="sim",
            replicas_wanted=2,
            cell_replicas_max=cell_replicas_max,
        )
        await plane.put("models/tiny", base_digest=digest, pool_id="pool")
        settings = GatewaySettings(
            instance_id="g",
            http_address=f"127.0.0.1:{free_port()}",
            control_address=plane.grpc_address,
            state_dir=home / "gateway",
            artifacts_dir=artifacts_dir,
            valkey_url=valkey[1],
            kafka_bootstrap="127.0.0.1:1",
            flush_s=0.05,
            idle_grace_s=0.0,
        )
        gateway = await stack.enter_async_context(running_gateway(settings))
        base_url = f"http://{settings.http_address}/v1"
        http = sse.session(base_url, made.json()["key"], WAIT_S)
        yield Site(gateway, await stack.enter_async_context(http), routers, tritons)


async def _stop_all(routers: dict[str, ChildProcess]) -> None:
    for router in routers.values():
        await router.stop()


def all_serve(site: Site) -> bool:
    """Whether both replicas can be reached through the routers of their cells."""
    links = site.gateway.links
    found = links.find("pool", SimpleNamespace(wish=Wish(0, (), 1, 1)))
    views = [view for link in links._links.values() for view in link.cells.values()]
    return found is not None and sum(view.replicas_ready for view in views) == 2


async def outlive_router(site: Site, how: signal.Signals, eventually) -> str:
    """Send a signal to the router of the first cell; no stream ends, none is changed.

    Returns its name. One that was frozen goes on.
    """
    await eventually(lambda: all_serve(site), timeout_s=WAIT_S)
    undisturbed = await site.undisturbed()
    loser = site.owners()["pool-0"]
    (heir,) = set(site.routers) - {loser}
    site.pause_s, ended_at, moved_at = 0.0, 0.0, 0.0

    def note_move(_: object) -> None:
        nonlocal moved_at
        if ended_at and not moved_at and set(site.owners().values()) == {heir}:
            moved_at = time.monotonic()

    def end() -> None:
        nonlocal ended_at
        ended_at = time.monotonic()
        os.kill(site.routers[loser].pid, how)

    site.gateway.watcher.on_change(note_move)
    assert await site.many(end) == undisturbed
    await eventually(lambda: moved_at)
    log.info(  # `pytest -rP` shows it
        "failover_measured",
        how=how.name,
        gateway_knows_after_s=round(moved_at - ended_at, 3),
        longest_pause_s=round(site.pause_s, 3),
    )
    assert set(site.owners().values()) == {heir}
    if how is signal.SIGSTOP:
        os.kill(site.routers[loser].pid, signal.SIGCONT)
        assert await site.many() == undisturbed, "who wakes up does no harm"
        assert set(site.owners().values()) == {heir}
    return loser


async def restart_router(site: Site, name: str, plane) -> None:
    """Start a router again that was killed or told to end, and wait until it may own cells."""
    ended = site.routers[name]
    await ended.wait()
    site.routers[name] = await ChildProcess.start(ended.spec)
    await site.routers[name].wait_ready(WAIT_S)
    async with asyncio.timeout(WAIT_S):
        while not await _may_own(plane, name):  # noqa: ASYNC110 - the REST has no event
            await asyncio.sleep(0.1)


async def _may_own(plane, name: str) -> bool:
    listed = (await plane.admin.get("/v1/routers")).json()["data"]
    return any(router["id"] == name and not router["left_at"] for router in listed)
