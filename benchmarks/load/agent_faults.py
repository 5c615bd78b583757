"""Measures how fast an agent detects a fault of an engine, and how fast the replica recovers.

One operation is a fault in an idle replica that is ready, at a random moment between two probes.
Two times are counted from the fault. The time *detected* ends with the first report to the control
plane whose state is not ready. The time *ready* ends with the next report whose state is ready,
when the new engine has answered its first probe. `triton_killed` and `stub_killed` are SIGKILLs.
`frozen` is a SIGSTOP of the stub, during which Triton still reports ready. `agent_killed` is a
SIGKILL of the agent, which is started again at once while a client reads a stream from the engine.
In this case *ready* is the first report of the new agent, with the same engine. Another figure is
the client's longest wait between two tokens, for this stream and for an undisturbed stream. The
back-off between restarts has its smallest value, because with longer back-offs each round would
wait for the round before. Not measured: loading weights of a useful size, routers, clients.
Run: `python -m benchmarks.load.agent_faults [sim] [openvino]`.
"""

import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.results import write_result
from replica.agent.triton import MODEL, TritonLauncher
from sluice import shared_secret
from sluice.artifacts import import_directory
from sluice.kserve import HostStream
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.procfs import group_processes
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1 import agent_pb2_grpc
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as wire
from tests.support.random_models import write_random_model

_ROUNDS = 5
_DEADLINE_S = 60.0
_REPLICA = "r-1"
_PROBE_PERIOD_S = 0.4
_STREAM_TOKENS = 1500
# The stream must last longer than the restart of the agent, but not prolong the benchmark.
_OPTIONS = {"sim": {"speed": "0.5"}, "openvino": {}}


class ControlPlane(agent_pb2_grpc.AgentServiceServicer):
    """A control plane that requests one replica, and records the times of the agent's reports."""

    def __init__(self, wish: agent.DesiredReplica) -> None:
        self._desired = agent.SyncResponse(version=1, replicas=[wish])
        self._changes = asyncio.Condition()
        self.reports: list[tuple[float, agent.ObservedReplica]] = []

    async def Sync(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[agent.SyncRequest],
        context: "grpc.aio.ServicerContext[agent.SyncRequest, agent.SyncResponse]",
    ) -> None:
        """Serve one agent until the agent closes its stream."""
        await context.write(self._desired)
        async for request in request_iterator:
            async with self._changes:
                self.reports += [(time.monotonic(), seen) for seen in request.replicas]
                self._changes.notify_all()
            await context.write(self._desired)

    async def first(
        self, since_s: float, is_meant: Callable[[agent.ObservedReplica], bool]
    ) -> tuple[float, agent.ObservedReplica]:
        """Return the delay and the content of the first matching report after `since_s`."""
        async with asyncio.timeout(_DEADLINE_S), self._changes:
            while True:
                for at_s, seen in self.reports:
                    if at_s > since_s and is_meant(seen):
                        return at_s - since_s, seen
                await self._changes.wait()


def _is_ready(seen: agent.ObservedReplica) -> bool:
    return seen.state == control.REPLICA_STATE_READY


class FaultyNode:
    """A node whose agent runs one replica, and the faults that the benchmark causes."""

    def __init__(self, folder: Path, engine: str) -> None:
        write_random_model(folder / "model")
        digest = import_directory(folder / "model", folder / "artifacts")
        self.plane = ControlPlane(
            agent.DesiredReplica(
                replica_id=_REPLICA,
                base_digest=digest,
                engine=engine,
                engine_options=_OPTIONS[engine],
            )
        )
        self.port = free_port()
        self._folder = folder
        self.process: ChildProcess | None = None

    async def start_agent(self) -> None:
        """Start the agent's process, without waiting for its first report."""
        folder, http_port = self._folder, free_port()
        settings = {
            "NODE_ID": "node",
            "CONTROL_ADDRESS": f"127.0.0.1:{self.port}",
            "STATE_DIR": str(folder / "state"),
            "ARTIFACTS_DIR": str(folder / "artifacts"),
            "HTTP_ADDRESS": f"127.0.0.1:{http_port}",
            "BACKOFF_MAX_S": "0.1",
        }
        spec = ProcessSpec(
            name="agent",
            command=[sys.executable, "-m", "replica.agent"],
            env={
                "PATH": "/usr/bin:/bin",
                **shared_secret.environment(),
                **{f"AGENT__{name}": value for name, value in settings.items()},
            },
            log_file=folder / "agent.log",
            ready=lambda: port_answers("127.0.0.1", http_port),
            stop_grace_s=30.0,
        )
        self.process = await ChildProcess.start(spec)

    async def kill_agent(self) -> None:
        """Kill the agent with SIGKILL."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def _node(engine: str) -> AsyncGenerator[FaultyNode]:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        node = FaultyNode(Path(folder), engine)
        server = grpc.aio.server()
        agent_pb2_grpc.add_AgentServiceServicer_to_server(node.plane, server)
        server.add_insecure_port(f"127.0.0.1:{node.port}")
        await server.start()
        try:
            await node.start_agent()
            yield node
        finally:
            if node.process is not None:
                await node.process.stop()
            launcher = TritonLauncher(
                state_dir=Path(folder) / "state", artifacts_dir=Path(folder) / "artifacts"
            )
            await launcher.remove_leftovers()
            await server.stop(None)


def _stub_of(seen: agent.ObservedReplica) -> int:
    (stub,) = [pid for pid in group_processes(seen.pid) if pid != seen.pid]
    return stub


_FAULTS: dict[str, Callable[[agent.ObservedReplica], None]] = {
    "triton_killed": lambda seen: os.kill(seen.pid, signal.SIGKILL),
    "stub_killed": lambda seen: os.kill(_stub_of(seen), signal.SIGKILL),
    "frozen": lambda seen: os.kill(_stub_of(seen), signal.SIGSTOP),
}


async def _fault(node: FaultyNode, name: str, chance: random.Random) -> tuple[float, float]:
    """Cause a fault of the engine, and return the times *detected* and *ready* in seconds."""
    _, seen = await node.plane.first(0.0, _is_ready)
    seen = node.plane.reports[-1][1]
    await asyncio.sleep(1.0 + chance.uniform(0, _PROBE_PERIOD_S))
    begin_s = time.monotonic()
    _FAULTS[name](seen)
    detected_s, _ = await node.plane.first(begin_s, lambda report: not _is_ready(report))
    ready_s, after = await node.plane.first(
        begin_s, lambda report: _is_ready(report) and report.pid != seen.pid
    )
    assert after.grpc_address == seen.grpc_address
    return detected_s, ready_s


async def _longest_wait_s(address: str, epoch: int) -> float:
    """Read one long stream from the engine and return the longest time between two frames."""
    async with HostStream(address, MODEL, silence_s=_DEADLINE_S) as stream:
        await stream.open(timeout_s=_DEADLINE_S)
        attach = wire.Attach(router_id="bench", epoch=epoch, credit_frames=1_000_000)
        await stream.send(wire.HostRequest(attach=attach))
        sequence = wire.Sequence(
            id=1,
            prompt=[3, 4, 5],
            output_tokens_max=_STREAM_TOKENS,
            ignore_eos=True,
            cache_root=bytes(16),
        )
        submit = wire.Submit(epoch=epoch, sequences=[sequence])
        await stream.send(wire.HostRequest(submit=submit))
        last_s, worst_s, tokens = 0.0, 0.0, 0
        async for frame in stream:
            if not frame.step.token:
                continue
            now_s = time.monotonic()
            worst_s = max(worst_s, now_s - last_s) if tokens else 0.0
            last_s, tokens = now_s, tokens + len(frame.step.token)
            if tokens == _STREAM_TOKENS:
                return worst_s
    raise RuntimeError(f"the stream ended after {tokens} of {_STREAM_TOKENS} tokens")


async def _restart(node: FaultyNode, epoch: int) -> tuple[float, float]:
    """Kill the agent during a stream. Returns the time *ready* and the stream's longest wait."""
    _, seen = await node.plane.first(0.0, _is_ready)
    seen = node.plane.reports[-1][1]
    loop = asyncio.get_running_loop()
    reading = loop.create_task(_longest_wait_s(seen.grpc_address, epoch))
    await asyncio.sleep(0.5)
    begin_s = time.monotonic()
    await node.kill_agent()
    await node.start_agent()
    ready_s, after = await node.plane.first(begin_s, lambda _: True)
    assert (_is_ready(after), after.pid) == (True, seen.pid), after
    return ready_s, await reading


def _figures(values: list[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), 3),
        "worst": round(max(values), 3),
        "all": [round(value, 3) for value in values],
    }


async def measure(engine: str) -> dict[str, Any]:
    """Return the figures of one driver."""
    chance = random.Random(7)
    figures: dict[str, Any] = {}
    async with _node(engine) as node:
        for name in _FAULTS:
            times = [await _fault(node, name, chance) for _ in range(_ROUNDS)]
            figures[name] = {
                "detected_s": _figures([detected for detected, _ in times]),
                "ready_s": _figures([ready for _, ready in times]),
            }
        address = node.plane.reports[-1][1].grpc_address
        calm = [await _longest_wait_s(address, epoch) for epoch in range(1, _ROUNDS + 1)]
        restarts = [await _restart(node, 100 + epoch) for epoch in range(_ROUNDS)]
        figures["agent_killed"] = {
            "ready_s": _figures([ready for ready, _ in restarts]),
            "longest_wait_s": _figures([wait for _, wait in restarts]),
            "longest_wait_undisturbed_s": _figures(calm),
        }
    return figures


def main() -> None:
    """Measure the named drivers, both by default."""
    names = sys.argv[1:] or list(_OPTIONS)
    figures: dict[str, Any] = {"rounds": _ROUNDS}
    for name in names:
        figures[name] = asyncio.run(measure(name))
        for fault, times in figures[name].items():
            medians = {what: f"{found['median']}/{found['worst']}" for what, found in times.items()}
            print(name, fault, medians, flush=True)
    assert __doc__ is not None
    path = write_result("agent_faults", __doc__.split("Run:")[0].strip(), figures)
    print(path)


if __name__ == "__main__":
    main()
