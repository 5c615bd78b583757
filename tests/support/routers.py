"""For tests: real router processes on free ports, and words for what comes over the wire."""

import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from sluice import shared_secret
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.wire.engine.v1 import engine_pb2 as engine

_READY_S = 60.0


def logprob_rows(columns: engine.Logprobs) -> Iterator[tuple[int, tuple[float, dict[int, float]]]]:
    """Yield, for each token, its sequence or handle and (logprob, logprobs of alternatives)."""
    start = 0
    rows = zip(columns.sequence, columns.logprob, columns.top_count, strict=True)
    for key, logprob, count in rows:
        tops = slice(start, start + count)
        start += count
        top = zip(columns.top_token[tops], columns.top_logprob[tops], strict=True)
        yield key, (logprob, dict(top))


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
            **shared_secret.environment(),
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
