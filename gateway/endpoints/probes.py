"""What those who run the gateway ask it: whether it lives, whether it serves, its metrics."""

from collections.abc import Callable

import orjson
from aiohttp import web

from gateway.metrics import GatewayMetrics
from gateway.server.errors import error_body
from sluice.errors import ErrorCode

_JSON = "application/json"


class Probes:
    """The endpoints, which need no key."""

    def __init__(self, *, metrics: GatewayMetrics, not_ready_because: Callable[[], str]) -> None:
        """Compose; `not_ready_because` returns the reason, or an empty string when ready."""
        self._metrics = metrics
        self._not_ready_because = not_ready_because

    async def health(self, _: web.Request) -> web.Response:
        """GET /healthz: the process answers."""
        return _json({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """GET /readyz: requests can be served."""
        reason = self._not_ready_because()
        if not reason:
            return _json({"status": "ready"})
        body = error_body(ErrorCode.UNAVAILABLE, f"Not ready: {reason}.", status=503)
        return web.Response(body=body, status=503, content_type=_JSON, headers={"Retry-After": "1"})

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics for Prometheus."""
        return web.Response(
            body=self._metrics.page(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type=_JSON)
