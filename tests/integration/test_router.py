"""The router as a process, with real Tritons (engine `sim`) behind it and real faults."""

import asyncio
import os
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from replica.agent.replica_state import EngineSpec
from replica.agent.triton import MODEL
from sluice import shared_secret
from sluice.artifacts import import_directory
from sluice.hashing import chained_hashes
from sluice.ids import new_id
from sluice.kserve import HostStream
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.prompt_spans import SPAN_TOKENS
from sluice.token_ids import packed_ids
from sluice.watch import write_snapshot
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1.agent_pb2_grpc import AgentServiceStub
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub
from tests.links import trusted_channel
from tests.support.random_models import write_random_model
from tests.support.tritons import Triton, running_tritons

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CELL = "cell-1"
ROUTER = "router-1"
WAIT_S = 60.0
FINISHED = (wire.OUTCOME_KIND_LENGTH, wire.OUTCOME_KIND_STOP)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tritons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Triton]]:
    home = tmp_path_factory.mktemp("replicas")
    write_random_model(home / "base")
    digest = import_directory(home / "base", home / "artifacts")
    options = (("blocks", "4096"), ("cost_step_s", "0.02"), ("context_tokens_max", "4096"))
    spec = EngineSpec("sim", digest, options)
    async with running_tritons(home, {"replica-1": spec, "replica-2": spec}) as running:
        yield running


class Gateway:
    """A gateway worker's stream to the router."""

    def __init__(self, address: str) -> None:
        self.channel = trusted_channel(address)
        self.call = RouterServiceStub(self.channel).Connect()
        self.tokens: dict[int, list[int]] = {}
        self.outcomes: dict[int, wire.Outcome] = {}
        self.replicas: dict[int, str] = {}
        self.cells: dict[str, wire.CellState] = {}
        self.handles = 0

    async def submit(self, count: int, output: int, cell_id: str = CELL) -> list[int]:
        submits = []
        for _ in range(count):
            self.handles += 1
            submit = wire.Submit(
                handle=self.handles,
                cell_id=cell_id,
                tenant_id="tenant",
                prompt=[3 + self.handles % 400] * 40,
                output_tokens_max=output,
                ignore_eos=True,
                cache_root=bytes(16),
            )
            submits.append(submit)
        await self.call.write(wire.ConnectRequest(submits=submits))
        return [submit.handle for submit in submits]

    async def submit_prompt(self, prompt: "array[int]") -> list[int]:
        self.handles += 1
        submit = wire.Submit(
            handle=self.handles,
            cell_id=CELL,
            tenant_id="tenant",
            prompt_ids=packed_ids(prompt),
            block_hashes=chained_hashes(prompt, bytes(16)),
            output_tokens_max=5,
            ignore_eos=True,
            cache_root=bytes(16),
        )
        await self.call.write(wire.ConnectRequest(submits=[submit]))
        return [self.handles]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.take(await self.call.read())

    async def until_over(self, handles: list[int]) -> None:
        await self.until(lambda: all(handle in self.outcomes for handle in handles))

    def take(self, message: wire.ConnectResponse) -> None:
        assert message is not grpc.aio.EOF
        self.replicas.update({placed.handle: placed.replica_id for placed in message.placed})
        tokens = iter(message.token)
        for handle, count in zip(message.handle, message.count, strict=True):
            assert handle not in self.outcomes
            self.tokens.setdefault(handle, []).extend(next(tokens) for _ in range(count))
        for outcome in message.outcomes:
            assert outcome.handle not in self.outcomes
            self.outcomes[outcome.handle] = outcome
        self.cells.update({cell.cell_id: cell for cell in message.cells})

    @property
    def cell(self) -> wire.CellState:
        return self.cells.get(CELL, wire.CellState())


@dataclass
class Router:
    """The running process."""

    child: ChildProcess
    address: str
    http_address: str

    async def metrics(self) -> dict[str, float]:
        """The unlabelled metrics by name."""
        async with httpx.AsyncClient(base_url=f"http://{self.http_address}") as client:
            assert (await client.get("/readyz")).status_code == 200
            lines = (await client.get("/metrics")).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if "{" not in line and line[0] != "#")
        return {name: float(value) for name, value in pairs}

    @asynccontextmanager
    async def gateway(self, replicas: int, router_id: str = ROUTER) -> AsyncIterator[Gateway]:
        """A connected gateway, once so many replicas are attached."""
        gateway = Gateway(self.address)
        try:
            hello = wire.Hello(gateway_id="gateway")
            await gateway.call.write(wire.ConnectRequest(hello=hello))
            assert (await gateway.call.read()).welcome.router_id == router_id
            if replicas:
                await gateway.until(lambda: gateway.cell.replicas_ready == replicas)
            yield gateway
        finally:
            gateway.call.cancel()
            await gateway.channel.close()


@asynccontextmanager
async def running_router(
    home: Path, control_address: str, router_id: str = ROUTER
) -> AsyncIterator[Router]:
    port, http_port = free_port(), free_port()
    spec = ProcessSpec(
        name="router",
        command=[sys.executable, "-m", "router"],
        env={
            "PATH": "/usr/bin:/bin",
            **shared_secret.environment(),
            "ROUTER__INSTANCE_ID": router_id,
            "ROUTER__GRPC_ADDRESS": f"127.0.0.1:{port}",
            "ROUTER__HTTP_ADDRESS": f"127.0.0.1:{http_port}",
            "ROUTER__CONTROL_ADDRESS": control_address,
            "ROUTER__STATE_DIR": str(home),
        },
        log_file=home / "router.log",
        ready=lambda: port_answers("127.0.0.1", port),
    )
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(WAIT_S)
        yield Router(child, f"127.0.0.1:{port}", f"127.0.0.1:{http_port}")
    finally:
        await child.stop()


def write_fleet(addresses: list[str], home: Path) -> None:
    """Write the snapshot that a router starts from."""
    objects = control.Objects(
        cells=[control.Cell(id=CELL, pool_id="pool", router_id=ROUTER, epoch=1)],
        replicas=[
            control.Replica(
                id=f"replica-{number}",
                cell_id=CELL,
                grpc_address=address,
                triton_model=MODEL,
                state=control.REPLICA_STATE_READY,
            )
            for number, address in enumerate(addresses, start=1)
        ],
    )
    snapshot = control.WatchResponse(version=1, is_snapshot=True, upserts=objects)
    write_snapshot(iter([snapshot.SerializeToString()]), home / "router-snapshot.bin")


@pytest_asyncio.fixture(loop_scope="session")
async def router(tritons: list[Triton], tmp_path: Path) -> AsyncIterator[Router]:
    """A router whose control plane is away: it starts from its snapshot."""
    write_fleet([triton.launch.grpc_address for triton in tritons], tmp_path)
    async with running_router(tmp_path, f"127.0.0.1:{free_port()}") as running:
        yield running


class Wire:
    """A TCP connection through which a router reaches a Triton, and which can be cut."""

    def __init__(self, address: str) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.ends: list[asyncio.StreamWriter] = []

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond, onward = await asyncio.open_connection(self.host, self.port)
        self.ends += [writer, onward]
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.carry(reader, onward))
                tasks.create_task(self.carry(beyond, writer))
        finally:
            writer.transport.abort()
            onward.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        for end in self.ends:
            end.transport.abort()
        self.ends.clear()


async def test_a_cut_connection_costs_no_token(tritons: list[Triton], tmp_path: Path) -> None:
    wire_to_first = Wire(tritons[0].launch.grpc_address)
    server = await asyncio.start_server(wire_to_first.connect, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    write_fleet([f"127.0.0.1:{port}"], tmp_path)
    async with (
        server,
        running_router(tmp_path, f"127.0.0.1:{free_port()}") as router,
        router.gateway(1) as gateway,
    ):
        handles = await gateway.submit(10, 150)
        for share in (1, 40, 80, 120):
            await gateway.until(
                lambda share=share: all(len(gateway.tokens.get(h, ())) >= share for h in handles)
            )
            wire_to_first.cut()
        await gateway.until_over(handles)
        assert {gateway.outcomes[handle].kind for handle in handles} == {wire.OUTCOME_KIND_LENGTH}
        assert {len(gateway.tokens[handle]) for handle in handles} == {150}
        metrics = await router.metrics()
        assert metrics["router_streams_resumed_total"] == 4
        assert metrics["router_replicas_lost_total"] == 0
        assert metrics["router_requeues_total"] == 0
        assert metrics["router_stray_tokens_total"] == 0
        assert metrics["router_count_mismatches_total"] == 0


async def fill_spans(triton: Triton, prompts: int) -> None:
    """Let an engine receive other prompts, each of three spans, from another router."""
    rows = [array("I", [row, *range(3 * SPAN_TOKENS - 1)]) for row in range(prompts)]
    sequences = [
        engine.Sequence(id=row, prompt_ids=packed_ids(ids), output_tokens_max=1, ignore_eos=True)
        for row, ids in enumerate(rows)
    ]
    async with HostStream(triton.address, MODEL, silence_s=WAIT_S) as stream:
        await stream.open(timeout_s=WAIT_S)
        attach = engine.Attach(router_id="other", epoch=1, credit_frames=1000)
        await stream.send(engine.HostRequest(attach=attach))
        submit = engine.Submit(epoch=1, sequences=sequences)
        await stream.send(engine.HostRequest(submit=submit))
        ended = 0
        while ended < prompts:
            frame = await stream.receive(WAIT_S)
            assert frame is not None
            ended += len(frame.step.finished)


async def test_a_prompt_of_which_the_engine_dropped_a_part_is_sent_whole(
    tritons: list[Triton], tmp_path: Path
) -> None:
    write_fleet([tritons[0].address], tmp_path)
    prompt = array("I", [3 + number % 390 for number in range(2 * SPAN_TOKENS + 100)])

    async def answer(gateway: Gateway) -> list[int]:
        [handle] = await gateway.submit_prompt(prompt)
        await gateway.until_over([handle])
        assert gateway.outcomes[handle].kind == wire.OUTCOME_KIND_LENGTH
        return gateway.tokens[handle]

    async with (
        running_router(tmp_path, f"127.0.0.1:{free_port()}") as router,
        router.gateway(1) as gateway,
    ):
        whole = await answer(gateway)
        assert await answer(gateway) == whole
        assert (await router.metrics())["router_requeues_total"] == 0
        await fill_spans(tritons[0], 50)
        assert await answer(gateway) == whole
        assert (await router.metrics())["router_requeues_total"] == 1
        assert await answer(gateway) == whole
        assert (await router.metrics())["router_requeues_total"] == 1


async def test_streams_end_on_both_replicas(router: Router) -> None:
    async with router.gateway(2) as gateway:
        handles = await gateway.submit(60, 25)
        await gateway.until_over(handles)
        assert {gateway.outcomes[handle].kind for handle in handles} == {wire.OUTCOME_KIND_LENGTH}
        assert {len(gateway.tokens[handle]) for handle in handles} == {25}
        assert set(gateway.replicas.values()) == {"replica-1", "replica-2"}
        metrics = await router.metrics()
        assert metrics["router_tokens_total"] == 60 * 25
        assert metrics["router_stray_tokens_total"] == 0
        assert metrics["router_count_mismatches_total"] == 0


async def test_a_gateway_that_hangs_up_frees_the_engines(router: Router) -> None:
    async with router.gateway(2) as other:
        async with router.gateway(2) as gateway:
            await gateway.submit(20, 3000)
            await gateway.until(lambda: len(gateway.tokens) == 20)
        await other.until(lambda: other.cell.running == 0)
        assert (await router.metrics())["router_stray_tokens_total"] == 0


async def test_sigterm_finishes_running_requests(router: Router) -> None:
    async with router.gateway(2) as gateway:
        handles = await gateway.submit(10, 100)
        await gateway.until(lambda: len(gateway.tokens) == 10)
        os.kill(router.child.pid, signal.SIGTERM)
        await gateway.until_over(handles)
        assert {gateway.outcomes[handle].kind for handle in handles} == {wire.OUTCOME_KIND_LENGTH}
        assert await asyncio.wait_for(router.child.wait(), WAIT_S) == 0


async def test_a_frozen_triton_is_lost_and_comes_back(
    router: Router, tritons: list[Triton]
) -> None:
    async with router.gateway(2) as gateway:
        handles = await gateway.submit(20, 150)
        await gateway.until(lambda: len(gateway.tokens) == 20)
        tritons[0].signal(signal.SIGSTOP)
        try:
            await gateway.until_over(handles)
            lost = [h for h in handles if gateway.outcomes[h].kind == wire.OUTCOME_KIND_LOST]
            assert {gateway.replicas[handle] for handle in lost} == {"replica-1"}
            done = [h for h in handles if gateway.outcomes[h].kind in FINISHED]
            assert len(lost) + len(done) == 20
            again = await gateway.submit(5, 5)  # nothing waits for the frozen one
            await gateway.until_over(again)
            assert {gateway.replicas[handle] for handle in again} == {"replica-2"}
        finally:
            tritons[0].signal(signal.SIGCONT)
        # Triton 24.10 may end on waking up or at its next request ("lock_exception": what it shares
        # with its stub was held for too long). Then its agent starts it again.
        frozen = tritons[0].child
        await gateway.until(lambda: gateway.cell.replicas_ready == 2 or not frozen.is_running)
        await gateway.until_over(await gateway.submit(10, 5))
        await gateway.until(lambda: gateway.cell.replicas_ready == 2 or not frozen.is_running)
        if not frozen.is_running:
            await tritons[0].restart()
        await gateway.until(lambda: gateway.cell.replicas_ready == 2)


async def test_a_killed_triton_costs_no_unemitted_request(
    router: Router, tritons: list[Triton]
) -> None:
    async with router.gateway(2) as gateway:
        handles = await gateway.submit(20, 100)
        await gateway.until(lambda: len(gateway.tokens) >= 10)
        late = await gateway.submit(30, 10)
        tritons[0].signal(signal.SIGKILL)
        await gateway.until_over([*handles, *late])
        for handle in (*handles, *late):
            outcome = gateway.outcomes[handle]
            if outcome.kind == wire.OUTCOME_KIND_LOST:
                assert outcome.output_tokens == len(gateway.tokens[handle]) > 0
            else:
                assert outcome.kind == wire.OUTCOME_KIND_LENGTH
        await tritons[0].restart()
        await gateway.until(lambda: gateway.cell.replicas_ready == 2)
        again = await gateway.submit(10, 5)
        await gateway.until_over(again)
        assert {gateway.outcomes[handle].kind for handle in again} == {wire.OUTCOME_KIND_LENGTH}


async def test_a_new_replica_of_a_live_control_plane_is_used_within_moments(
    shared_control_plane, tritons: list[Triton], tmp_path: Path
) -> None:
    """Pool, cell, owner, replica: everything the router knows comes by `Watch`."""
    plane, name = shared_control_plane, new_id("router")
    pool_id, engine = new_id("pool"), new_id("engine")
    await plane.put(f"bases/{'ab' * 32}", context_tokens_max=4096)
    await plane.put(f"pools/{pool_id}", base_digest="ab" * 32, engine=engine, replicas_wanted=1)
    async with (
        running_router(tmp_path, plane.grpc_address, name) as router,
        router.gateway(0, name) as gateway,
        trusted_channel(plane.grpc_address) as channel,
    ):
        agent_stream = AgentServiceStub(channel).Sync()
        facts = agent.NodeFacts(cpu_count=2, memory_bytes=8 << 30, engines=[engine])
        node_id = new_id("node")
        await agent_stream.write(agent.SyncRequest(node_id=node_id, facts=facts))
        async with asyncio.timeout(WAIT_S):
            while not (wished := await agent_stream.read()).replicas:
                pass
        await gateway.until(lambda: f"{pool_id}-0" in gateway.cells)  # the router owns it
        handles = await gateway.submit(5, 10, f"{pool_id}-0")  # waits for a replica
        observed = agent.ObservedReplica(
            replica_id=wished.replicas[0].replica_id,
            state=control.REPLICA_STATE_READY,
            grpc_address=tritons[0].launch.grpc_address,
        )
        report = agent.SyncRequest(node_id=node_id, facts=facts, replicas=[observed])
        await agent_stream.write(report)
        await gateway.until_over(handles)
        assert {gateway.outcomes[handle].kind for handle in handles} == {wire.OUTCOME_KIND_LENGTH}
        agent_stream.cancel()
