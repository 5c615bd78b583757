"""Router processes for tests: the real one, on free ports."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers

_READY_S = 60.0


@asynccontextmanager
async def running_router(
    name: str, control_address: str, home: Path
) -> AsyncGenerator[ChildProcess]:
    """Run a router that the control plane knows by its name; it is stopped at the end.

    Args:
        name: Also of its log file and of its folder.
        control_address: host:port of the control plane's gRPC.
        home: Where log and state go.
    """
    port = free_port()
    spec = ProcessSpec(
        name=name,
        command=[sys.executable, "-m", "router"],
        env={
            "PATH": "/usr/bin:/bin",
            "ROUTER__INSTANCE_ID": name,
            "ROUTER__GRPC_ADDRESS": f"127.0.0.1:{port}",
            "ROUTER__HTTP_ADDRESS": f"127.0.0.1:{free_port()}",
            "ROUTER__CONTROL_ADDRESS": control_address,
            "ROUTER__STATE_DIR": str(home / name),
        },
        log_file=home / f"{name}.log",
        ready=lambda: port_answers("127.0.0.1", port),
    )
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(_READY_S)
        yield child
    finally:
        await child.stop()
