"""In place of ClickHouse: the engine of the local stack behind HTTP, on a network.

The trace store of `sluice up` serves the loopback only. Here callers come by the name `clickhouse`,
with the password that the real image takes from the environment; the user's name is not looked at.
"""  # noqa: INP001 - a script of an image

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from cli.stack.chdb_engine import ChdbEngine
from cli.stack.tracestore import TraceStore, TraceStoreLimits
from sluice.lifecycle import stop_signals
from sluice.logs import configure_logs

_PORT = 8123
_DIRECTORY = Path("/var/lib/clickhouse")
_THREADS = 4
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _from_the_network(request: web.Request, handler: _Handler) -> web.StreamResponse:
    return await handler(request.clone(host="127.0.0.1"))


async def _run() -> None:
    pool = ThreadPoolExecutor(_THREADS)
    loop = asyncio.get_running_loop()
    limits = {"max_execution_time": "120", "max_threads": str(_THREADS)}
    engine = await loop.run_in_executor(pool, lambda: ChdbEngine(_DIRECTORY, limits=limits))
    store = TraceStore(engine, pool, TraceStoreLimits(), os.environ["CLICKHOUSE_PASSWORD"])
    application = store.application()
    application.middlewares.append(_from_the_network)
    runner = web.AppRunner(application, handler_cancellation=False, access_log=None)
    async with stop_signals() as stop:
        await runner.setup()
        try:
            await web.TCPSite(runner, "0.0.0.0", _PORT, shutdown_timeout=5.0).start()
            await stop.wait()
        finally:
            await runner.cleanup()
            await loop.run_in_executor(pool, engine.close)
            pool.shutdown()


if __name__ == "__main__":
    configure_logs("clickhouse")
    asyncio.run(_run())
