"""The agent with real Triton processes: it finds out what is wrong with them, and leaves nothing."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio

from replica.agent.replica_state import EngineSpec
from replica.agent.triton import MODEL, OWNER, TritonLauncher
from replica.engine.testing import write_random_model
from sluice.artifacts import import_directory
from sluice.ids import new_id
from sluice.kserve import HostStream
from sluice.process import MARKER, ChildProcess, ProcessSpec, free_port, port_is_free
from sluice.procfs import group_processes, kill_marked, marked_processes
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1 import agent_pb2_grpc
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine

pytestmark = pytest.mark.real

SHM = Path("/dev/shm")
READY, FAILED = control.REPLICA_STATE_READY, control.REPLICA_STATE_FAILED
WAIT_S = 60.0
REPEAT_S = 5.0  # as the control plane does


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

    def want(self, *replicas: agent.DesiredReplica) -> None:
        with self._news:
            version = self._desired.version + 1
            self._desired = agent.SyncResponse(version=version, replicas=replicas)
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

    def spec(self, control_address: str = "") -> ProcessSpec:
        settings = {
            "NODE_ID": "node-1",
            "CONTROL_ADDRESS": control_address or self.control.address,
            "STATE_DIR": str(self.directory / "state"),
            "ARTIFACTS_DIR": str(self.directory / "artifacts"),
            "HTTP_ADDRESS": self.http,
        }
        return ProcessSpec(
            name="agent",
            command=[sys.executable, "-m", "replica.agent"],
            env={
                "PATH": "/usr/bin:/bin",
                MARKER: self.marker,
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

    async def start_agent(self, control_address: str = "") -> ChildProcess:
        child = await ChildProcess.start(self.spec(control_address))
        await child.wait_ready(WAIT_S)
        return child


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


def stub_of(replica: agent.ObservedReplica) -> int:
    (stub,) = [pid for pid in group_processes(replica.pid) if pid != replica.pid]
    return stub


def is_ready(replica_id: str = "r-1", *, restarts: int = 0) -> Callable[..., bool]:
    return lambda found: (
        replica_id in found
        and found[replica_id].state == READY
        and found[replica_id].restarts == restarts
    )


def tell(node: Node, what: str, begin_s: float) -> None:
    """Print when the fault was seen and when the replica was ready again; never asserted."""
    news = [
        (at_s - begin_s, control.ReplicaState.Name(request.replicas[0].state))
        for at_s, request in node.control.history
        if at_s > begin_s and request.replicas
    ]
    seen = next((at_s for at_s, state in news if not state.endswith("READY")), -1.0)
    sys.stdout.write(f"{what}: detected after {seen:.2f} s, ready after {news[-1][0]:.2f} s\n")


async def test_faulty_engines_are_detected_replaced_and_leave_nothing(node: Node) -> None:
    process = await node.start_agent()
    try:
        assert (await node.get("/readyz")).status_code == 503
        node.control.want(node.replica())
        found = await node.control.until(is_ready())
        assert (await node.get("/readyz")).status_code == 200
        assert found["r-1"].message == ""

        faults = {
            "stub killed": lambda replica: os.kill(stub_of(replica), signal.SIGKILL),
            "stub frozen": lambda replica: os.kill(stub_of(replica), signal.SIGSTOP),
            "tritonserver killed": lambda replica: os.kill(replica.pid, signal.SIGKILL),
            "tritonserver frozen": lambda replica: os.kill(replica.pid, signal.SIGSTOP),
        }
        for restarts, (what, fault) in enumerate(faults.items(), start=1):
            before = found["r-1"]
            old = group_processes(before.pid)
            begin_s = time.monotonic()
            fault(before)
            found = await node.control.until(is_ready(restarts=restarts))
            tell(node, what, begin_s)
            after = found["r-1"]
            assert after.grpc_address == before.grpc_address, "routers need not learn a new address"
            assert not set(old) & set(node.engines())
            assert set(node.engines()) == set(group_processes(after.pid))
            assert len(node.shared_memory()) == 1

        metrics = (await node.get("/metrics")).text
        assert f"agent_engine_failures_total {len(faults)}.0" in metrics
        assert 'agent_replicas{state="ready"} 1.0' in metrics
        found = await node.control.until(lambda found: found["r-1"].memory_bytes > 10_000_000)
    finally:
        await process.stop()
    assert process.status == 0, process.log_tail(30)
    assert node.engines() == []
    assert node.shared_memory() == []
    assert marked_processes(node.marker) == []
    assert port_is_free("127.0.0.1", int(node.http.rpartition(":")[2]))


async def test_killed_agent_starts_again_with_one_engine_without_control_plane(node: Node) -> None:
    node.control.want(node.replica())
    process = await node.start_agent()
    found = await node.control.until(is_ready())
    first = set(node.engines())
    assert len(first) == 2
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert set(node.engines()) == first, "engines outlive a killed agent"
    node.control.stop()

    second = await ChildProcess.start(node.spec())
    try:
        await second.wait_ready(WAIT_S)
        await node.until_ready()
        assert not first & set(node.engines())
        assert len(node.engines()) == 2
        assert len(node.shared_memory()) == 1

        node.control.start()  # the control plane comes back and learns what runs
        node.control.request = None
        again = await node.control.until(is_ready())
        assert again["r-1"].pid in node.engines()
        assert again["r-1"].grpc_address == found["r-1"].grpc_address
    finally:
        await second.stop()
    assert (second.status, node.engines(), node.shared_memory()) == (0, [], [])


async def submit(router: HostStream, *, tokens: int) -> None:
    await router.open(timeout_s=WAIT_S)
    await router.send(
        engine.HostRequest(attach=engine.Attach(router_id="r", epoch=1, credit_frames=10_000))
    )
    sequence = engine.Sequence(
        id=1, prompt=[3, 4, 5], output_tokens_max=tokens, ignore_eos=True, cache_root=bytes(16)
    )
    await router.send(engine.HostRequest(submit=engine.Submit(epoch=1, sequences=[sequence])))


async def end_of(router: HostStream) -> engine.FinishReason:
    async for frame in router:
        for finished in frame.step.finished:
            return finished.reason
    raise AssertionError("the stream ended before the sequence")


async def test_desired_state_is_followed(node: Node) -> None:
    process = await node.start_agent()
    try:
        node.control.want(node.replica("a"), node.replica("b"))
        found = await node.control.until(
            lambda found: is_ready("a")(found) and is_ready("b")(found)
        )
        assert len({found[name].grpc_address for name in "ab"}) == 2
        facts = node.control.request.facts if node.control.request else agent.NodeFacts()
        assert (facts.cpu_count > 0, list(facts.engines)) == (True, ["openvino", "sim"])

        async with HostStream(found["a"].grpc_address, MODEL, silence_s=WAIT_S) as router:
            await submit(router, tokens=1500)  # 3 s
            node.control.want(node.replica("a", is_draining=True))
            await node.control.until(lambda found: set(found) == {"a"})
            await node.control.until(
                lambda found: found["a"].state == control.REPLICA_STATE_DRAINING
            )
            assert (await node.get("/readyz")).status_code == 200
            assert await end_of(router) == engine.FINISH_REASON_LENGTH, "a drain cuts nothing"
        await node.control.until(lambda found: found["a"].state == control.REPLICA_STATE_STOPPED)
        await node.until_engines([])
        await node.until(lambda: not (node.directory / "state" / "replicas" / "b").exists())

        node.control.want()
        await node.control.until(lambda found: not found)
        await node.until(lambda: not (node.directory / "state" / "replicas" / "a").exists())
        assert node.shared_memory() == []
    finally:
        await process.stop()
    assert process.status == 0


async def test_an_agent_that_is_stopped_while_an_engine_starts_leaves_nothing(node: Node) -> None:
    process = await node.start_agent()
    node.control.want(node.replica("a"), node.replica("b"))
    await node.until(node.engines)
    await process.stop()
    assert (process.status, node.engines(), node.shared_memory()) == (0, [], [])


async def test_what_cannot_start_is_reported_in_words_and_tried_again(node: Node) -> None:
    process = await node.start_agent()
    try:
        node.control.want(
            node.replica("no-artifact", base_digest="f" * 64),
            node.replica("no-engine", engine="abacus"),
            node.replica("../escape"),
            node.replica("no-option", engine_options={"sped": "2"}),
        )
        found = await node.control.until(
            lambda found: len(found) == 4 and all(r.restarts > 0 for r in found.values())
        )
        found = await node.control.until(
            lambda found: all(r.state == FAILED for r in found.values())
        )
        assert "is not in" in found["no-artifact"].message
        assert "AGENT__ENGINES" in found["no-engine"].message
        assert "replica id" in found["../escape"].message
        assert "unknown engine option sped" in found["no-option"].message
        assert not (node.directory / "state" / "escape").exists()
        ready = await node.get("/readyz")
        assert (ready.status_code, "AGENT__ENGINES" in ready.text) == (503, True)
    finally:
        await process.stop()
    assert process.status == 0


async def test_a_second_agent_on_the_same_state_directory_is_refused(node: Node) -> None:
    process = await node.start_agent()
    try:
        second = await ChildProcess.start(node.spec())
        status = await second.wait()
        await second.stop()
        assert status == 1
        assert f"process id {process.pid}" in second.log_tail()
    finally:
        await process.stop()


async def test_a_taken_http_port_is_said_in_words(node: Node) -> None:
    taken = await asyncio.start_server(
        lambda *_: None, "127.0.0.1", int(node.http.rpartition(":")[2])
    )
    child = await ChildProcess.start(node.spec())
    status = await child.wait()
    await child.stop()
    taken.close()
    await taken.wait_closed()
    assert (status, "AGENT__HTTP_ADDRESS" in child.log_tail()) == (1, True)


async def test_preflight_is_a_command(node: Node) -> None:
    spec = replace(node.spec(), command=[sys.executable, "-m", "replica.agent", "preflight"])
    child = await ChildProcess.start(spec)
    status = await child.wait()
    await child.stop()
    assert (status, spec.log_file.read_text()) == (0, "")


async def test_launcher_keeps_its_ports_while_they_are_free(node: Node) -> None:
    spec = EngineSpec("sim", node.digest)
    first = node.launcher.prepare("r-1", spec)
    assert node.launcher.prepare("r-1", spec).grpc_address == first.grpc_address
    taken = await asyncio.start_server(
        lambda *_: None, "127.0.0.1", int(first.grpc_address.rpartition(":")[2])
    )
    moved = node.launcher.prepare("r-1", spec)
    taken.close()
    await taken.wait_closed()
    assert moved.grpc_address != first.grpc_address
    other = node.launcher.prepare("r-2", spec)
    assert not {other.grpc_address, other.metrics_address} & {
        moved.grpc_address,
        moved.metrics_address,
    }
    assert moved.process.env["SLUICE_ENGINE"] == "sim"
    assert "PYTHONPATH" not in moved.process.env


async def test_the_control_plane_grows_and_shrinks_a_pool(
    node: Node, control_plane, eventually
) -> None:
    async def listed() -> list[dict[str, object]]:
        return (await control_plane.admin.get("/v1/replicas")).json()["data"]

    async def ready_replicas(count: int) -> bool:
        replicas = await listed()
        return len(replicas) == count and all(
            replica["state"] == "ready" and replica["grpc_address"] for replica in replicas
        )

    process = await node.start_agent(control_plane.grpc_address)
    try:
        await control_plane.put(f"bases/{node.digest}", name="tiny", context_tokens_max=2048)
        pool = {"base_digest": node.digest, "engine": "sim"}
        await control_plane.put("pools/main", **pool, replicas_wanted=2)
        await eventually(lambda: ready_replicas(2), "two replicas are ready", WAIT_S)
        addresses = {replica["grpc_address"] for replica in await listed()}
        assert len(addresses) == 2

        await control_plane.put("pools/main", **pool, replicas_wanted=1)
        await eventually(lambda: ready_replicas(1), "one replica is left", WAIT_S)
        await node.until(lambda: len(node.engines()) == 2)
        (left,) = await listed()
        assert left["grpc_address"] in addresses
    finally:
        await process.stop()
    assert (process.status, node.engines(), node.shared_memory()) == (0, [], [])
