"""Routers and agents with a real control plane: who owns which cell, and which replicas run."""

import asyncio
import signal
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import grpc.aio
import pytest

from control_plane.fleet.cells import ROUTER_GRACE_S
from sluice.ids import new_id
from sluice.watch import ControlWatcher
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1.agent_pb2_grpc import AgentServiceStub
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub
from tests.links import trusted_channel

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DEADLINE_S = 60.0
DIGEST = "ef" * 32


@asynccontextmanager
async def listening():
    """An address where somebody answers, as long as the block runs."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def router(plane, name: str, address: str):
    """What a router shows of itself: an open watch with an address."""
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_ROUTER, name, address)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        try:
            yield watcher
        finally:
            running.cancel()


@asynccontextmanager
async def observer(plane):
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_OPERATOR, "observer")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        try:
            yield watcher
        finally:
            running.cancel()


class Agent:
    """An agent's side of Sync."""

    def __init__(self, call, node_id: str, engine: str) -> None:
        self.call, self.node_id = call, node_id
        self.facts = agent.NodeFacts(cpu_count=2, memory_bytes=8 << 30, engines=[engine])

    async def report(self, *replicas: agent.ObservedReplica, cordon: str = "") -> None:
        message = agent.SyncRequest(
            node_id=self.node_id,
            replicas=replicas,
            facts=self.facts,
            is_cordoned=bool(cordon),
            cordon_reason=cordon,
        )
        await self.call.write(message)

    async def told(self, condition) -> agent.SyncResponse:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                response = await self.call.read()
                assert isinstance(response, agent.SyncResponse), "the stream ended"
                if condition(response):
                    return response


@asynccontextmanager
async def node(plane, node_id: str, engine: str):
    async with trusted_channel(plane.grpc_address) as channel:
        call = AgentServiceStub(channel).Sync()
        found = Agent(call, node_id, engine)
        await found.report()
        yield found
        call.cancel()


async def _pool(plane, *, engine: str = "none", replicas: int = 0) -> str:
    pool_id = new_id("pool")
    await plane.put(f"bases/{DIGEST}", context_tokens_max=2048)
    await plane.put(f"pools/{pool_id}", base_digest=DIGEST, engine=engine, replicas_wanted=replicas)
    return pool_id


def owners(watcher, cells: list[str]) -> list[tuple[str, str]]:
    found = [watcher.state.cells.get(cell, wire.Cell()) for cell in cells]
    return [(cell.router_id, cell.router_address) for cell in found]


async def test_cells_go_to_live_routers_and_are_handed_over(
    shared_control_plane, eventually
) -> None:
    plane = shared_control_plane
    cells = [f"{await _pool(plane)}-0" for _ in range(2)]
    async with (
        listening() as at_1,
        listening() as at_2,
        listening() as elsewhere,
        AsyncExitStack() as first,
    ):
        one = await first.enter_async_context(router(plane, "r1", at_1))
        await eventually(lambda: owners(one, cells) == [("r1", at_1)] * 2, "r1 owns both")
        epochs = [one.state.cells[cell].epoch for cell in cells]
        async with router(plane, "r2", at_2) as two:
            assert await two.wait_synced(DEADLINE_S)
            assert owners(two, cells) == owners(one, cells), "a newcomer takes nothing"
            third = f"{await _pool(plane)}-0"
            await eventually(
                lambda: two.state.cells.get(third, wire.Cell()).router_id == "r2",
                "a new cell goes to the router with the fewest",
            )
            left_s = time.monotonic()
            await first.aclose()
            async with router(plane, "r1", at_1) as back:
                assert await back.wait_synced(DEADLINE_S)
                if time.monotonic() - left_s < ROUTER_GRACE_S:  # else the machine was too busy
                    assert [back.state.cells[cell].epoch for cell in cells] == epochs
            await eventually(lambda: owners(two, cells) == [("r2", at_2)] * 2, "r2 takes them over")
            assert [two.state.cells[cell].epoch for cell in cells] == [e + 1 for e in epochs]
        async with router(plane, "r2", elsewhere) as moved:
            await eventually(
                lambda: owners(moved, cells) == [("r2", elsewhere)] * 2, "the new address is told"
            )
    shown = (await plane.admin.get("/v1/routers")).json()["data"]
    assert {found["id"] for found in shown} >= {"r1", "r2"}


async def test_a_pool_is_split_into_cells_and_roles(shared_control_plane, eventually) -> None:
    plane = shared_control_plane
    pool_id = await _pool(plane)
    pool = {"base_digest": DIGEST, "engine": "sim-s", "cell_replicas_max": 2}
    await plane.put(
        f"pools/{pool_id}", **pool, replicas_wanted=5, roles={"prefill": 2, "decode": 3}
    )
    async with (
        router(plane, "r1", "127.0.0.1:7001") as watcher,
        node(plane, "node-s", "sim-s") as found,
    ):

        def replicas() -> list[wire.Replica]:
            return [r for r in watcher.state.replicas.values() if r.pool_id == pool_id]

        def cells() -> dict[str, wire.Cell]:
            return {c.id: c for c in watcher.state.cells.values() if c.pool_id == pool_id}

        def size(cell_id: str) -> int:
            return sum(r.cell_id == cell_id for r in replicas())

        async def end_what_drains() -> None:
            ready = [
                agent.ObservedReplica(
                    replica_id=r.id, state=wire.REPLICA_STATE_READY, grpc_address="127.0.0.1:9"
                )
                for r in replicas()
                if r.state != wire.REPLICA_STATE_DRAINING
            ]
            await found.report(*ready)

        await eventually(lambda: len(replicas()) == 5, "they are made")
        for query, count in {f"pool_id={pool_id}": 5, "node_id=node-s": 5, "pool_id=p": 0}.items():
            listed = (await plane.admin.get(f"/v1/replicas?{query}")).json()["data"]
            assert len(listed) == count, query
        assert {cell_id: size(cell_id) for cell_id in cells()} == {
            f"{pool_id}-0": 2,
            f"{pool_id}-1": 2,
            f"{pool_id}-2": 1,
        }
        await eventually(lambda: all(c.router_id for c in cells().values()), "each has an owner")
        assert sorted(r.role for r in replicas()) == ["decode"] * 3 + ["prefill"] * 2
        await plane.put(f"pools/{pool_id}", **pool, replicas_wanted=1)
        await eventually(
            lambda: [c.is_draining for _, c in sorted(cells().items())] == [False, True, True],
            "two cells drain",
        )
        await eventually(
            lambda: sum(r.state == wire.REPLICA_STATE_DRAINING for r in replicas()) == 4,
            "and so do four replicas",
        )
        await end_what_drains()
        await eventually(lambda: list(cells()) == [f"{pool_id}-0"], "then they go")
        assert size(f"{pool_id}-0") == 1
        assert {r.role for r in replicas()} == {""}


async def test_a_replica_from_wish_to_end(shared_control_plane, eventually) -> None:
    plane = shared_control_plane
    pool_id = await _pool(plane, engine="sim-a", replicas=1)
    await plane.put(
        f"pools/{pool_id}", base_digest=DIGEST, engine="sim-a", engine_options={"slots": "4"}
    )
    async with (
        router(plane, "r1", "127.0.0.1:7001") as watcher,
        node(plane, "node-a", "sim-a") as found,
    ):
        response = await found.told(lambda response: len(response.replicas) == 1)
        wanted = response.replicas[0]
        assert (wanted.pool_id, wanted.base_digest, wanted.engine) == (pool_id, DIGEST, "sim-a")
        assert dict(wanted.engine_options) == {"slots": "4"}
        replica_id = wanted.replica_id

        def seen() -> wire.Replica:
            return watcher.state.replicas.get(replica_id, wire.Replica())

        await eventually(lambda: seen().state == wire.REPLICA_STATE_STARTING, "it is announced")
        ready = agent.ObservedReplica(
            replica_id=replica_id,
            state=wire.REPLICA_STATE_READY,
            grpc_address="127.0.0.1:9001",
            pid=7,
            memory_bytes=1 << 33,
        )
        await found.report(ready)
        await eventually(lambda: seen().state == wire.REPLICA_STATE_READY, "it is ready")
        assert seen() == wire.Replica(
            id=replica_id,
            pool_id=pool_id,
            cell_id=f"{pool_id}-0",
            node_id="node-a",
            grpc_address="127.0.0.1:9001",
            triton_model="llm",
            state=wire.REPLICA_STATE_READY,
            profile="frames",
        )
        listed = (await plane.admin.get("/v1/replicas")).json()["data"]
        shown = next(replica for replica in listed if replica["id"] == replica_id)
        assert (shown["state"], shown["pid"], shown["memory_bytes"]) == ("ready", 7, 1 << 33)
        await plane.put(f"pools/{pool_id}", base_digest=DIGEST, engine="sim-a", replicas_wanted=0)
        await found.told(lambda response: [r.is_draining for r in response.replicas] == [True])
        await eventually(lambda: seen().state == wire.REPLICA_STATE_DRAINING, "it drains")
        await found.report()  # it ended
        await found.told(lambda response: not response.replicas)
        await eventually(lambda: replica_id not in watcher.state.replicas, "it is forgotten")


async def test_no_router_is_given_a_pool_that_makes_embeddings(
    shared_control_plane, eventually
) -> None:
    plane = shared_control_plane
    async with (
        router(plane, "r1", "127.0.0.1:7001") as watcher,
        node(plane, "node-e", "embed") as embedding,
        node(plane, "node-f", "sim-f") as chatting,
    ):
        embed_pool = await _pool(plane, engine="embed", replicas=1)
        chat_pool = await _pool(plane, engine="sim-f", replicas=1)
        for found in (embedding, chatting):
            await found.told(lambda response: len(response.replicas) == 1)

        def profiles() -> dict[str, tuple[str, str]]:
            return {
                replica.pool_id: (replica.triton_model, replica.profile)
                for replica in watcher.state.replicas.values()
                if replica.node_id in {"node-e", "node-f"}
            }

        wanted = {embed_pool: ("embed", "embed"), chat_pool: ("llm", "frames")}
        await eventually(lambda: profiles() == wanted, "both are announced, with their profiles")

        def owner(pool_id: str) -> str:
            return watcher.state.cells[f"{pool_id}-0"].router_id

        await eventually(lambda: owner(chat_pool) == "r1", "the chat cell has an owner")
        assert owner(embed_pool) == ""


async def test_a_lost_node_is_replaced_and_may_come_back(shared_control_plane, eventually) -> None:
    plane = shared_control_plane
    pool_id = await _pool(plane, engine="sim-b", replicas=1)
    async with router(plane, "r1", "127.0.0.1:7001") as watcher:

        def states() -> dict[str, int]:
            replicas = watcher.state.replicas.values()
            return {r.node_id: r.state for r in replicas if r.pool_id == pool_id}

        async with node(plane, "node-b", "sim-b") as found:
            await found.told(lambda response: len(response.replicas) == 1)
        await _pretend_silence(plane, "node-b")
        await eventually(
            lambda: states() == {"node-b": wire.REPLICA_STATE_LOST}, "the node is lost"
        )
        async with node(plane, "node-c", "sim-b") as other:
            response = await other.told(lambda response: len(response.replicas) == 1)
            await eventually(lambda: "node-c" in states(), "another replica is made")
            assert states()["node-b"] == wire.REPLICA_STATE_LOST, "kept until that one is ready"
            await other.report(
                agent.ObservedReplica(
                    replica_id=response.replicas[0].replica_id,
                    state=wire.REPLICA_STATE_READY,
                    grpc_address="127.0.0.1:9002",
                )
            )
            await eventually(
                lambda: states() == {"node-c": wire.REPLICA_STATE_READY}, "the lost one goes"
            )
            async with node(plane, "node-b", "sim-b") as back:
                assert not (await back.told(lambda _: True)).replicas, "told to stop its own"


async def test_replicas_of_a_cordoned_node_are_made_elsewhere(
    shared_control_plane, eventually
) -> None:
    plane = shared_control_plane
    await _pool(plane, engine="sim-c", replicas=1)
    async with node(plane, "node-x", "sim-c") as broken:
        response = await broken.told(lambda response: len(response.replicas) == 1)
        replica_id = response.replicas[0].replica_id
        stopped = agent.ObservedReplica(replica_id=replica_id, state=wire.REPLICA_STATE_STOPPED)
        async with node(plane, "node-y", "sim-c") as other:
            assert not (await other.told(lambda _: True)).replicas
            await broken.report(stopped, cordon="GPU 0: XID 79")
            made = await other.told(lambda response: len(response.replicas) == 1)
            assert made.replicas[0].replica_id != replica_id
            nodes = (await plane.admin.get("/v1/nodes")).json()["data"]
            reasons = {found["id"]: found["cordon_reason"] for found in nodes}
            assert (reasons["node-x"], reasons["node-y"]) == ("GPU 0: XID 79", "")


async def _pretend_silence(plane, node_id: str) -> None:
    url = plane.spec.env["CONTROL_PLANE__DATABASE_URL"].replace("+asyncpg", "")
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            "UPDATE nodes SET seen_at = now() - interval '60 s' WHERE id = $1", node_id
        )
    finally:
        await connection.close()


async def test_a_frozen_router_loses_its_cells(shared_control_plane, eventually) -> None:
    plane = shared_control_plane
    script = (
        "import asyncio, sys\n"
        "from sluice import shared_secret\n"
        "from sluice.watch import ControlWatcher\n"
        "from sluice.wire.control.v1 import control_pb2 as wire\n"
        "shared_secret.use()\n"
        "asyncio.run(ControlWatcher(sys.argv[1], wire.ROLE_ROUTER, 'r0', '127.0.0.1:7000').run())\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, plane.grpc_address), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await eventually(lambda: _is_here(plane, "r0"), "the router came")
        cell = f"{await _pool(plane)}-0"
        async with observer(plane) as watcher:
            await eventually(
                lambda: watcher.state.cells.get(cell, wire.Cell()).router_id == "r0", "r0 owns it"
            )
            async with router(plane, "r1", "127.0.0.1:7001"):
                process.send_signal(signal.SIGSTOP)  # its connection stays open, and silent
                await eventually(
                    lambda: watcher.state.cells[cell].router_id == "r1", "r1 takes it over"
                )
    finally:
        process.kill()
        await process.wait()


async def _is_here(plane, router_id: str) -> bool:
    routers = (await plane.admin.get("/v1/routers")).json()["data"]
    return any(found["id"] == router_id and not found["left_at"] for found in routers)


@pytest.mark.parametrize("strange", ["", "a b", "x\0y", "x" * 200])
async def test_a_router_without_a_proper_name_is_sent_away(shared_control_plane, strange) -> None:
    async with trusted_channel(shared_control_plane.grpc_address) as channel:
        call = ControlServiceStub(channel).Watch(
            wire.WatchRequest(role=wire.ROLE_ROUTER, instance_id=strange, address="127.0.0.1:1")
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        agent_call = AgentServiceStub(channel).Sync()
        await agent_call.write(agent.SyncRequest(node_id=strange))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await agent_call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
