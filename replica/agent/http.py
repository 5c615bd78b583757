"""/healthz, /readyz and /metrics of the agent."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


async def serve_http(
    address: str, registry: CollectorRegistry, why_not_ready: Callable[[], str]
) -> web.AppRunner:
    """Listen on `address` (host:port) and return the runner; its owner calls `cleanup`.

    Args:
        address: Where to listen.
        registry: What /metrics shows.
        why_not_ready: Empty when the node's replicas are ready; else what /readyz answers.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        problem = why_not_ready()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ready'}\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": _TEXT})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    host, _, port = address.rpartition(":")
    try:
        await web.TCPSite(runner, host, int(port), shutdown_timeout=1.0).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
