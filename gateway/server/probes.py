"""Endpoints of liveness, readiness and metrics for operators."""

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.metadata import version

import orjson
from aiohttp import web

from gateway.server.errors import error_body
from sluice.errors import ErrorCode

_JSON = "application/json"


class Probes:
    """The endpoints, which need no key."""

    def __init__(
        self, *, read_metrics: Callable[[], Awaitable[bytes]], not_ready_because: Callable[[], str]
    ) -> None:
        """Both functions are called for each request that needs them.

        Args:
            read_metrics: Returns a page in Prometheus' text format.
            not_ready_because: Returns the reason, or an empty string when ready.
        """
        self._read_metrics = read_metrics
        self._not_ready_because = not_ready_because

    async def health(self, _: web.Request) -> web.Response:
        """GET /healthz, which succeeds while the process answers."""
        return _json({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """GET /readyz, which succeeds while requests can be served."""
        reason = self._not_ready_because()
        if not reason:
            return _json({"status": "ready"})
        body = error_body(ErrorCode.UNAVAILABLE, f"Not ready: {reason}.")
        return web.Response(body=body, status=503, content_type=_JSON, headers={"Retry-After": "1"})

    async def version(self, _: web.Request) -> web.Response:
        """GET /version, in vLLM's form."""
        return _json({"version": _version()})

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics for Prometheus."""
        return web.Response(
            body=await self._read_metrics(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


@cache
def _version() -> str:
    return version("sluice")


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type=_JSON)
