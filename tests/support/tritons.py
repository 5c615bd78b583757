"""Real Tritons without an agent, for tests and benchmarks."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from replica.agent.replica_state import EngineSpec
from replica.agent.triton import LOOPBACK, Launch, TritonLauncher
from sluice.process import ChildProcess, port_answers
from sluice.procfs import group_processes

_READY_S = 60.0  # alone it takes two seconds; beside a busy test run, ten


@dataclass
class Triton:
    """A running Triton that may be broken, and started again at its address."""

    replica_id: str
    launch: Launch
    child: ChildProcess

    @property
    def address(self) -> str:
        """Where it serves gRPC: host:port."""
        return self.launch.grpc_address

    @property
    def metrics_url(self) -> str:
        """Where it tells its metrics."""
        return self.launch.metrics_url

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to Triton and to its stub."""
        for process in group_processes(self.child.pid):
            os.kill(process, number)

    async def restart(self) -> None:
        """Stop what is left of it, start it again, and wait until it is ready."""
        await self.child.stop()
        self.child = await self.launch.start()
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Wait until it serves: gRPC, and its metrics, whose port it opens after that of gRPC."""
        await self.child.wait_ready(_READY_S)
        async with asyncio.timeout(_READY_S):
            while True:
                try:
                    await port_answers(LOOPBACK, self.launch.ports.metrics)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    return


@asynccontextmanager
async def running_tritons(
    home: Path, specs: Mapping[str, EngineSpec], *, artifacts_dir: Path | None = None
) -> AsyncGenerator[list[Triton]]:
    """Start one Triton per replica id, all at once; yield them when all are ready, then stop them.

    Args:
        home: Holds their state, and the artifacts where `artifacts_dir` is None.
        specs: Replica id -> what to serve.
        artifacts_dir: Holds one directory per artifact digest; None takes `home / "artifacts"`.
    """
    launcher = TritonLauncher(
        state_dir=home / "state", artifacts_dir=artifacts_dir or home / "artifacts"
    )
    started: list[Triton] = []
    try:
        for replica_id, spec in specs.items():
            launch = launcher.prepare(replica_id, spec)
            child = await launch.start()
            started.append(Triton(replica_id, launch, child))
        for triton in started:
            await triton.wait_ready()
        yield started
    finally:
        for triton in started:
            await triton.child.stop()


@asynccontextmanager
async def running_triton(home: Path, spec: EngineSpec) -> AsyncGenerator[Triton]:
    """Start one Triton with the artifacts of `home`; yield it when it is ready, then stop it."""
    async with running_tritons(home, {"r1": spec}) as (triton,):
        yield triton
