"""An agent's world: directories, ports, a control plane that says what a test wants it to say."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx
import pytest_asyncio

from replica.agent.app import Agent, no_hardware
from replica.agent.hardware import HardwareReader
from replica.agent.settings import AgentSettings
from replica.agent.triton import MODEL, OWNER, TritonLauncher
from sluice import shared_secret
from sluice.artifacts import import_directory
from sluice.ids import new_id
from sluice.kserve import HostStream
from sluice.process import MARKER, ChildProcess, ProcessSpec, free_port
from sluice.procfs import group_processes, kill_marked, marked_processes
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1 import agent_pb2_grpc
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine
from tests.support.random_models import write_random_model

SHM = Path("/dev/shm")
WAIT_S = 60.0
REPEAT_S = 5.0  # as the control plane does

OpenHardware = Callable[[], HardwareReader | None]


class ControlPlane(agent_pb2_grpc.AgentServiceServicer):
    """The control plane's side of `Sync`, on a real gRPC server: says what a test wants it to say."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.request: agent.SyncRequest | None = None
        self.history: list[tuple[float, agent.SyncRequest]] = []
        self._desired = agent.SyncResponse()
        self._news = threading.Condition()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8))
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address) != 0
        self._server.start()

    def stop(self) -> None:
        assert self._server is not None
        with self._news:
            server, self._server = self._server, None
            self._news.notify_all()
        server.stop(grace=None).wait()

    def want(self, *replicas: agent.DesiredReplica, lifted_cordons: Sequence[str] = ()) -> None:
        with self._news:
            version = self._desired.version + 1
            self._desired = agent.SyncResponse(
                version=version, replicas=replicas, lifted_cordons=lifted_cordons
            )
            self._news.notify_all()

    def Sync(self, request_iterator, context) -> Iterator[agent.SyncResponse]:  # noqa: N802 - gRPC's name
        reader = threading.Thread(target=self._read, args=(request_iterator,), daemon=True)
        reader.start()
        sent, sent_at_s = 0, 0.0  # nothing is said before the first wish
        while context.is_active() and self._server is not None:
            with self._news:
                desired = self._desired
                is_due = desired.version and time.monotonic() > sent_at_s + REPEAT_S
                if desired.version == sent and not is_due:
                    self._news.wait(timeout=0.2)
                    continue
            sent, sent_at_s = desired.version, time.monotonic()
            yield desired

    def _read(self, requests: Iterator[agent.SyncRequest]) -> None:
        try:
            for request in requests:
                with self._news:
                    self.request = request
                    self.history.append((time.monotonic(), request))
                    self._news.notify_all()
        except grpc.RpcError:
            pass  # the agent is gone

    async def until_ready(self, *names: str, restarts: int = 0) -> list[agent.ObservedReplica]:
        """Wait until these replicas are ready, after so many failures; return them in order."""
        found = await self.until(
            lambda found: all(
                name in found
                and found[name].state == control.REPLICA_STATE_READY
                and found[name].restarts == restarts
                for name in names
            )
        )
        return [found[name] for name in names]

    async def until(
        self, condition: Callable[[dict[str, agent.ObservedReplica]], object]
    ) -> dict[str, agent.ObservedReplica]:
        """Wait until the condition holds for what the agent observes, by replica id."""
        async with asyncio.timeout(WAIT_S):
            while True:
                request = self.request
                if request is not None:
                    replicas = {item.replica_id: item for item in request.replicas}
                    if condition(replicas):
                        return replicas
                await asyncio.sleep(0.01)


@dataclass
class Node:
    """One agent's world: directories, ports, and the launcher's names for what it may leave."""

    directory: Path
    digest: str
    marker: str
    control: ControlPlane
    http: str

    @property
    def launcher(self) -> TritonLauncher:
        return TritonLauncher(
            state_dir=self.directory / "state", artifacts_dir=self.directory / "artifacts"
        )

    def spec(self, control_address: str = "", **changes: object) -> ProcessSpec:
        """How to run an agent; `changes` are settings, in lower case."""
        settings = {
            "NODE_ID": "node-1",
            "CONTROL_ADDRESS": control_address or self.control.address,
            "STATE_DIR": str(self.directory / "state"),
            "ARTIFACTS_DIR": str(self.directory / "artifacts"),
            "HTTP_ADDRESS": self.http,
            **{name.upper(): str(value) for name, value in changes.items()},
        }
        return ProcessSpec(
            name="agent",
            command=[sys.executable, "-m", "replica.agent"],
            env={
                "PATH": "/usr/bin:/bin",
                MARKER: self.marker,
                **shared_secret.environment(),
                **{f"AGENT__{name}": value for name, value in settings.items()},
            },
            log_file=self.directory / "agent.log",
            ready=self.answers,
            stop_grace_s=30.0,
        )

    async def answers(self) -> None:
        async with httpx.AsyncClient() as client:
            (await client.get(f"http://{self.http}/healthz")).raise_for_status()

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(f"http://{self.http}{path}")

    def replica(self, replica_id: str = "r-1", **changes: object) -> agent.DesiredReplica:
        wish = agent.DesiredReplica(
            replica_id=replica_id, pool_id="pool", base_digest=self.digest, engine="sim"
        )
        wish.MergeFrom(agent.DesiredReplica(**changes))  # type: ignore[arg-type]
        return wish

    @staticmethod
    def stub_of(replica: agent.ObservedReplica) -> int:
        (stub,) = [pid for pid in group_processes(replica.pid) if pid != replica.pid]
        return stub

    def engines(self) -> list[int]:
        """All processes that any agent of this state directory has started and that live."""
        return marked_processes(self.launcher.owner, variable=OWNER)

    def shared_memory(self) -> list[str]:
        return [path.name for path in SHM.glob(f"sluice_{self.launcher.owner}_*")]

    async def until_ready(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - polls, as balancers do
                await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - watches processes and files, which set no event
                await asyncio.sleep(0.05)

    async def until_engines(self, pids: list[int]) -> None:
        await self.until(lambda: set(self.engines()) == set(pids))

    async def start_agent(self, control_address: str = "", **settings: object) -> ChildProcess:
        child = await ChildProcess.start(self.spec(control_address, **settings))
        await child.wait_ready(WAIT_S)
        return child

    def agent(self, open_hardware: OpenHardware = no_hardware, **changes: object) -> Agent:
        """Return an agent that runs in this process: no second of imports."""
        values = {
            "node_id": "node-1",
            "control_address": self.control.address,
            "state_dir": self.directory / "state",
            "artifacts_dir": self.directory / "artifacts",
            "http_address": self.http,
        }
        settings = AgentSettings.model_validate(values | changes)
        return Agent(settings, self.launcher, open_hardware=open_hardware)

    @asynccontextmanager
    async def running_agent(
        self, open_hardware: OpenHardware = no_hardware, **changes: object
    ) -> AsyncGenerator[None]:
        """Run an agent in this process, from start to its orderly end."""
        stop = asyncio.Event()
        self.control.request = None  # of the agent before
        async with asyncio.TaskGroup() as group:
            group.create_task(self.agent(open_hardware, **changes).run(stop))
            try:
                yield
            finally:
                stop.set()

    async def command(self, word: str) -> tuple[int, str]:
        """Run `python -m replica.agent WORD` and return its status and what it says."""
        spec = replace(
            self.spec(),
            command=[sys.executable, "-m", "replica.agent", word],
            log_file=self.directory / f"{new_id(word)}.log",
        )
        child = await ChildProcess.start(spec)
        status = await child.wait()
        await child.stop()
        return status, spec.log_file.read_text()

    async def kill_agent(self, process: ChildProcess) -> None:
        """As a crash does: nothing of the agent has time to clean up."""
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        self.control.request = None  # of the agent before

    def events(self, name: str) -> list[dict[str, object]]:
        """What agents have logged under this name, oldest first."""
        lines = (self.directory / "agent.log").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record["event"] == name]

    def tell(self, what: str, begin_s: float) -> None:
        """Print when the fault was seen and when the replica was ready again; never asserted."""
        news = [
            (at_s - begin_s, control.ReplicaState.Name(request.replicas[0].state))
            for at_s, request in self.control.history
            if at_s > begin_s and request.replicas
        ]
        seen = next((at_s for at_s, state in news if not state.endswith("READY")), -1.0)
        sys.stdout.write(f"{what}: detected after {seen:.2f} s, ready after {news[-1][0]:.2f} s\n")


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    write_random_model(tmp_path / "model")
    digest = import_directory(tmp_path / "model", tmp_path / "artifacts")
    plane = ControlPlane(free_port())
    plane.start()
    node = Node(tmp_path, digest, new_id("test"), plane, f"127.0.0.1:{free_port()}")
    yield node
    if plane._server is not None:
        plane.stop()
    await kill_marked(node.marker)
    await node.launcher.remove_leftovers()


class Traffic:
    """A router's attachment with one long sequence, read in the background."""

    def __init__(self, address: str) -> None:
        self._stream = HostStream(address, MODEL, silence_s=WAIT_S)
        self._reader: asyncio.Task[None] | None = None
        self.tokens: list[int] = []
        self.worst_gap_s = 0.0
        self.reason = engine.FINISH_REASON_UNSPECIFIED

    async def start(self, *, tokens: int) -> None:
        """Attach and submit; the `sim` driver emits about 500 tokens per second."""
        await self._stream.open(timeout_s=WAIT_S)
        attach = engine.Attach(router_id="r", epoch=1, credit_frames=1_000_000)
        await self._stream.send(engine.HostRequest(attach=attach))
        sequence = engine.Sequence(
            id=1, prompt=[3, 4, 5], output_tokens_max=tokens, ignore_eos=True, cache_root=bytes(16)
        )
        submit = engine.Submit(epoch=1, sequences=[sequence])
        await self._stream.send(engine.HostRequest(submit=submit))
        loop = asyncio.get_running_loop()
        self._reader = loop.create_task(self._read())  # `drop` ends it

    async def _read(self) -> None:
        last_s = time.monotonic()
        async for frame in self._stream:
            now_s = time.monotonic()
            self.worst_gap_s, last_s = max(self.worst_gap_s, now_s - last_s), now_s
            self.tokens += frame.step.token
            for finished in frame.step.finished:
                self.reason = finished.reason
                return

    @property
    def is_running(self) -> bool:
        return self._reader is not None and not self._reader.done()

    async def end(self) -> engine.FinishReason:
        """Wait for the end of the sequence and return why it ended."""
        assert self._reader is not None
        async with asyncio.timeout(WAIT_S):
            await self._reader
        await self._stream.close(timeout_s=2.0)
        return self.reason

    async def drop(self) -> None:
        """End at once, whatever runs."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)  # its engine may be gone
        await self._stream.close(timeout_s=0.0)


@pytest_asyncio.fixture
async def start_traffic() -> AsyncIterator[Callable[..., Awaitable[Traffic]]]:
    started: list[Traffic] = []

    async def start(address: str, *, tokens: int) -> Traffic:
        started.append(Traffic(address))
        await started[-1].start(tokens=tokens)
        return started[-1]

    yield start
    for traffic in started:
        await traffic.drop()
