"""`python -m gateway` runs one worker in this process, or several under a parent process."""

import asyncio
import gc
import os
import signal
import socket
import sys
from functools import partial

import structlog
import uvloop

from gateway.server.checks import allow_open_files, problems
from gateway.server.operations import all_metrics, serving_operations
from gateway.server.probes import Probes
from gateway.server.runner import bound_socket
from gateway.server.worker_link import WorkerEnd
from gateway.server.workers import running_workers
from gateway.settings import GatewaySettings
from sluice import certificates, shared_secret
from sluice.grpc_polling import poll_in_place
from sluice.identity import CertificateRole
from sluice.lifecycle import stop_signals
from sluice.logs import configure_logs

log = structlog.get_logger(__name__)

_GC_THRESHOLDS = (10_000, 20, 100)
# Seconds after which a thread that prepares a large prompt must release the interpreter lock to the
# event loop. At Python's default of 5 ms, a prompt of 220 KB delayed the loop by 6 to 9 ms. At 1
# ms, the delay is 3 ms.
_SWITCH_INTERVAL_S = 0.001


async def _serve_alone(settings: GatewaySettings) -> None:
    from gateway.app import running_gateway

    async with stop_signals() as stop, running_gateway(settings) as gateway:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.reload_certificate)
        async with serving_operations(settings.ops_address, gateway.probes()):
            _settle()
            await stop.wait()
            await gateway.stop()


async def _serve_slot(
    settings: GatewaySettings, listener: int, link: int, ready_wait_s: float
) -> None:
    """Run as a worker of a parent process.

    The parent passes the numbers of two sockets. `listener` accepts clients, and `link` connects
    this worker to the parent.
    """
    from gateway.app import running_gateway

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # Ctrl-C reaches parent and workers
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        parent = WorkerEnd(socket.socket(fileno=link), stop)
        talk = tasks.create_task(parent.run())
        async with running_gateway(
            settings, socket.socket(fileno=listener), ready_wait_s=ready_wait_s, stop=stop
        ) as gateway:
            parent.serve(
                read_metrics=gateway.metrics.page, not_ready_because=gateway.not_ready_because
            )
            _settle()
            await stop.wait()
            await gateway.stop(is_replaced=parent.is_retired)
        talk.cancel()


async def _supervise(settings: GatewaySettings) -> None:
    sockets = [
        bound_socket(settings.host, settings.port, is_shared=True) for _ in range(settings.workers)
    ]
    async with stop_signals() as stop, running_workers(settings, sockets) as workers:
        probes = Probes(
            read_metrics=partial(all_metrics, workers), not_ready_because=workers.not_ready_because
        )
        async with serving_operations(settings.ops_address, probes):
            await stop.wait()
            await workers.stop()


def _settle() -> None:
    """Exclude the objects that exist now from garbage collection, since all are permanent.

    Requests create few reference cycles. So the collector runs after every 10,000 allocations,
    instead of after every 700, which is Python's default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def main() -> None:
    """Run until SIGTERM or SIGINT, or exit with status 2 if the settings are not valid."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # ignored until the end of startup
    settings = GatewaySettings.from_environment()
    configure_logs("gateway")
    poll_in_place()
    certificates.use(CertificateRole.GATEWAY)
    shared_secret.use()
    # For one short text, as a prompt is, several tokenizing threads cost more time than they save.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    is_worker = sys.argv[1:2] == ["worker"]
    if not is_worker and (found := list(problems(settings))):
        sys.stderr.write("\n".join(found) + "\n")
        raise SystemExit(2)
    allow_open_files(settings)
    if is_worker:
        listener, link, ready_wait_s = sys.argv[2:]
        # All workers write to their parent's log, so each line names its worker.
        structlog.contextvars.bind_contextvars(worker=settings.instance_id)
        uvloop.run(_serve_slot(settings, int(listener), int(link), float(ready_wait_s)))
    elif settings.workers == 1:
        uvloop.run(_serve_alone(settings))
    else:
        uvloop.run(_supervise(settings))


if __name__ == "__main__":
    main()
