"""A real engine host behind an in-process server that speaks ModelStreamInfer as Triton does."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from replica.drivers.registry import load_driver
from replica.engine.driver import Driver
from replica.host import EngineHost
from router.app import run
from router.settings import Settings
from sluice.process import free_port
from sluice.triton import Servicer, add_servicer, messages
from sluice.watch import write_snapshot
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub
from tests.links import trusted_channel
from tests.support.routers import logprob_rows

CELL = "cell-contract"
ROUTER = "router-contract"


class StreamResponder:
    """A host's responder that writes to a gRPC stream on the event loop."""

    def __init__(self, loop, responses: asyncio.Queue, request_id: str, *, wants_final: bool):
        self.loop = loop
        self.responses = responses
        self.request_id = request_id
        self.wants_final = wants_final
        self.is_gone = threading.Event()

    def _put(self, message: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.responses.put_nowait, (self.request_id, message))

    def send(self, frame: bytes) -> None:
        message = messages.ModelStreamInferResponse()
        message.infer_response.id = self.request_id
        message.infer_response.raw_output_contents.append(frame)
        self._put(message)

    def finish(self) -> None:
        message = messages.ModelStreamInferResponse()
        message.infer_response.id = self.request_id
        message.infer_response.parameters["triton_final_response"].bool_param = True
        if self.wants_final:
            self._put(message)
        self.loop.call_soon_threadsafe(self.responses.put_nowait, (self.request_id, None))

    def is_cancelled(self) -> bool:
        return self.is_gone.is_set()


@dataclass
class HostServer:
    """One replica: `address` speaks ModelStreamInfer; `stop` ends it as a kill would."""

    host: EngineHost
    server: grpc.aio.Server
    address: str
    is_silent: bool = False
    closed: bool = False
    holds: asyncio.Event = field(default_factory=asyncio.Event)
    streams: dict[asyncio.Queue, None] = field(default_factory=dict)

    def cut(self, status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """Break every open stream; the host goes on."""
        for responses in self.streams:
            responses.put_nowait(("", status))

    async def stop(self) -> None:
        if not self.closed:
            self.closed = True
            await self.server.stop(0)
            await asyncio.to_thread(self.host.close, 0.0)


async def serve_driver(driver: Driver) -> HostServer:
    host = EngineHost(driver, "sha256:" + "0" * 64)
    host.start()
    loop = asyncio.get_running_loop()
    server = grpc.aio.server()
    holder: list[HostServer] = []

    async def stream_infer(requests, context):
        responses: asyncio.Queue = asyncio.Queue()
        responders: list[StreamResponder] = []
        in_flight = 0
        is_half_closed = False

        async def read():
            nonlocal in_flight, is_half_closed
            async for message in requests:
                wants = "triton_enable_empty_final_response" in message.parameters
                responder = StreamResponder(loop, responses, message.id, wants_final=wants)
                responders.append(responder)
                in_flight += 1
                host.handle(message.raw_input_contents[0], responder)
            is_half_closed = True
            responses.put_nowait(("", None))

        holder[0].streams[responses] = None
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(read())
                while not (is_half_closed and in_flight == 0):
                    request_id, data = await responses.get()
                    if isinstance(data, grpc.StatusCode):
                        reader.cancel()
                        await context.abort(data, "cut")
                    if data is None:
                        in_flight -= bool(request_id)
                    elif not holder[0].is_silent:
                        await context.write(data)
                reader.cancel()
        finally:
            del holder[0].streams[responses]
            for responder in responders:
                responder.is_gone.set()

    servicer = Servicer()
    servicer.ModelStreamInfer = stream_infer
    add_servicer(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    holder.append(HostServer(host, server, f"127.0.0.1:{port}"))
    return holder[0]


StartHost = Callable[..., Awaitable[HostServer]]


@pytest.fixture
async def hosts() -> AsyncIterator[StartHost]:
    """Start real engine hosts: of a driver, or of the sim driver with these options."""
    started: list[HostServer] = []

    async def start(driver: Driver | None = None, **options) -> HostServer:
        if driver is None:
            options = {"speed": 20.0, "blocks": 4096, "sequences_max": 256} | options
            driver = load_driver("sim", None, "sha256:" + "0" * 64, options)
        server = await serve_driver(driver)
        started.append(server)
        return server

    yield start
    for server in started:
        await server.stop()


class Gateway:
    """One gateway worker's stream, as the real one uses it."""

    def __init__(self, address: str, options: tuple[tuple[str, int], ...] = ()):
        self.channel = trusted_channel(address, options=options)
        self.call = RouterServiceStub(self.channel).Connect()
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[tuple[float, dict[int, float]]]] = {}
        self.outcomes: dict[int, wire.Outcome] = {}
        self.placed: dict[int, list[wire.Placed]] = {}
        self.cells: dict[str, wire.CellState] = {}
        self.handles = 0

    async def hello(self) -> wire.Welcome:
        await self.call.write(wire.ConnectRequest(hello=wire.Hello(gateway_id="gateway-1")))
        return (await self.call.read()).welcome

    async def submit(self, *, prompt_tokens=20, output=20, count=1, **fields) -> list[int]:
        submits = []
        for _ in range(count):
            self.handles += 1
            words = {
                "cell_id": CELL,
                "tenant_id": "tenant-a",
                "prompt": [3 + self.handles % 1000] * prompt_tokens,
                "ignore_eos": True,
                "cache_root": b"0" * 16,
            }
            words |= {"handle": self.handles, "output_tokens_max": output} | fields
            submits.append(wire.Submit(**words))
        await self.call.write(wire.ConnectRequest(submits=submits))
        return [submit.handle for submit in submits]

    async def cancel(self, *handles: int) -> None:
        await self.call.write(wire.ConnectRequest(cancels=handles))

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.take(await self.call.read())

    async def until_ready(self, replicas: int = 1) -> None:
        await self.until(lambda: CELL in self.cells and self.cells[CELL].replicas_ready >= replicas)

    async def until_over(self, handles: list[int]) -> None:
        await self.until(lambda: all(handle in self.outcomes for handle in handles))

    def take(self, message: wire.ConnectResponse) -> None:
        assert message is not grpc.aio.EOF
        for placed in message.placed:
            self.placed.setdefault(placed.handle, []).append(placed)
        start = 0
        for handle, count in zip(message.handle, message.count, strict=True):
            assert handle not in self.outcomes
            assert handle in self.placed
            self.tokens.setdefault(handle, []).extend(message.token[start : start + count])
            start += count
        assert start == len(message.token)
        for handle, row in logprob_rows(message.logprobs):
            self.logprobs.setdefault(handle, []).append(row)
            assert len(self.logprobs[handle]) <= len(self.tokens[handle])
        for outcome in message.outcomes:
            assert outcome.handle not in self.outcomes
            self.outcomes[outcome.handle] = outcome
        for cell in message.cells:
            self.cells[cell.cell_id] = cell

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


@dataclass
class RunningRouter:
    """The real router in this process, its control plane away: it starts from the snapshot."""

    settings: Settings
    stop: asyncio.Event
    task: asyncio.Task


StartRouter = Callable[..., Awaitable[RunningRouter]]


@pytest.fixture
async def start_router(tmp_path: Path) -> AsyncIterator[StartRouter]:
    """Start the router with replicas at the given addresses."""
    started: list[RunningRouter] = []

    async def start(*addresses: str, **fields) -> RunningRouter:
        objects = control.Objects(
            cells=[control.Cell(id=CELL, pool_id="pool", router_id=ROUTER, epoch=1)],
            replicas=[
                control.Replica(
                    id=f"replica-{number}",
                    pool_id="pool",
                    cell_id=CELL,
                    grpc_address=address,
                    triton_model="llm",
                    state=control.REPLICA_STATE_READY,
                )
                for number, address in enumerate(addresses)
            ],
        )
        snapshot = control.WatchResponse(version=1, is_snapshot=True, upserts=objects)
        write_snapshot(iter([snapshot.SerializeToString()]), tmp_path / "router-snapshot.bin")
        settings = Settings(
            instance_id=ROUTER,
            grpc_address=f"127.0.0.1:{free_port()}",
            http_address=f"127.0.0.1:{free_port()}",
            control_address=f"127.0.0.1:{free_port()}",
            state_dir=tmp_path,
            **fields,
        )
        stop = asyncio.Event()
        task = asyncio.get_running_loop().create_task(run(settings, stop))
        router = RunningRouter(settings, stop, task)
        started.append(router)
        async with asyncio.timeout(60), trusted_channel(settings.grpc_address) as channel:
            await channel.channel_ready()
        return router

    yield start
    for router in started:
        router.stop.set()
        await asyncio.wait_for(router.task, 60)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Awaitable[Gateway]]]:
    """Connect a gateway to a router's address and say hello."""
    opened: list[Gateway] = []

    async def open_gateway(address: str, *options: tuple[str, int]) -> Gateway:
        gateway = Gateway(address, options)
        opened.append(gateway)
        assert (await gateway.hello()).router_id == ROUTER
        return gateway

    yield open_gateway
    for gateway in opened:
        await gateway.close()
