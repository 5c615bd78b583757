"""The small endpoints: models, health, metrics."""

from collections.abc import Callable

import orjson
from aiohttp import web

from gateway.directory import Directory, Principal
from gateway.metrics import GatewayMetrics
from gateway.server.errors import error_body
from gateway.server.middleware import authenticate
from gateway.server.routes import path_rest
from sluice.errors import ErrorCode
from sluice.wire.control.v1 import control_pb2 as control

_JSON = "application/json"


class SmallEndpoints:
    """Everything but completions."""

    def __init__(
        self,
        *,
        directory: Directory,
        metrics: GatewayMetrics,
        not_ready_because: Callable[[], str],
    ) -> None:
        """Compose; `not_ready_because` returns the reason, or an empty string when ready."""
        self._directory = directory
        self._metrics = metrics
        self._not_ready_because = not_ready_because

    async def list_models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        principal = authenticate(self._directory, request)
        found = self._directory.models(principal)
        models = [self._shown(public.name, public.model, principal) for public in found]
        return _json({"object": "list", "data": models})

    async def get_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}; ids may contain slashes."""
        principal = authenticate(self._directory, request)
        name = path_rest(request, "/v1/models/")
        return _json(self._shown(name, self._directory.model(principal, name), principal))

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

    def _shown(self, name: str, model: control.Model, principal: Principal) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": model.created_at_unix_s,
            "owned_by": "sluice" if not model.owner_tenant_id else principal.tenant.id,
            "context_window": self._directory.context_tokens_max(principal, model),
        }


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type=_JSON)
