"""`python -m gateway`: one worker in this process, or a parent that keeps several running."""

import asyncio
import gc
import os
import sys
from functools import partial

import structlog
import uvloop

from gateway.app import running_gateway
from gateway.settings import GatewaySettings
from sluice.lifecycle import stop_signals
from sluice.logs import configure_logs
from sluice.process import ChildProcess, ProcessSpec, keep_running

log = structlog.get_logger(__name__)

_WORKER_READY_S = 60.0
_GC_THRESHOLDS = (10_000, 20, 100)


async def _serve(settings: GatewaySettings) -> None:
    async with stop_signals() as stop, running_gateway(settings):
        # What lives by now lives as long as the process: the collector need not look at it. And
        # requests make few cycles, so that it may come less often than every 700 allocations.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        await stop.wait()


async def _supervise(settings: GatewaySettings) -> None:
    """Run the workers; they share the port, so that each accepts its part of the connections."""
    async with stop_signals() as stop, asyncio.TaskGroup() as tasks:
        workers = [
            tasks.create_task(
                keep_running(
                    _worker_spec(settings, index),
                    ready_timeout_s=_WORKER_READY_S,
                    on_change=partial(_log_change, index),
                )
            )
            for index in range(settings.workers)
        ]
        await stop.wait()
        for worker in workers:
            worker.cancel()


def _worker_spec(settings: GatewaySettings, index: int) -> ProcessSpec:
    environment = {
        **os.environ,
        "GATEWAY__WORKERS": "1",
        "GATEWAY__REUSE_PORT": "true",
        "GATEWAY__INSTANCE_ID": f"{settings.instance_id}-{index}",
    }

    async def ready() -> None:
        """The port is shared: only the worker itself could tell, and it ends when it fails."""

    return ProcessSpec(
        name=f"gateway-{index}",
        command=[sys.executable, "-m", "gateway"],
        env=environment,
        log_file=settings.state_dir / f"worker-{index}.log",
        ready=ready,
        stop_grace_s=settings.drain_s + 10,
    )


def _log_change(index: int, child: ChildProcess | None, state: str) -> None:
    log.info("worker_changed", worker=index, pid=child.pid if child else None, state=state)


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    settings = GatewaySettings.from_environment()
    configure_logs("gateway")
    uvloop.run(_serve(settings) if settings.workers == 1 else _supervise(settings))


if __name__ == "__main__":
    main()
