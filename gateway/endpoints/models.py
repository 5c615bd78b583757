"""GET /v1/models and /v1/models/{id}: the models that a caller may use, and their state."""

import orjson
from aiohttp import web

from gateway.directory import Directory, Principal
from gateway.limits.caller import caller_limits
from gateway.pool_board import PoolBoard
from gateway.pool_status import joined
from gateway.server.middleware import authenticate
from gateway.server.routes import path_rest
from sluice.limits import METERED_NAMES
from sluice.scopes import Scope
from sluice.wire.control.v1 import control_pb2 as control

_JSON = "application/json"


class Models:
    """Both endpoints of one worker."""

    def __init__(self, *, directory: Directory, pools: PoolBoard) -> None:
        """Compose."""
        self._directory = directory
        self._pools = pools

    async def list_all(self, request: web.Request) -> web.Response:
        """GET /v1/models: by name, chat models first, as many tools take the first one."""
        principal = self._admitted(request)
        found = self._directory.models(principal)
        models = [self._shown(public.name, public.model, principal) for public in found]
        models.sort(key=lambda shown: shown["kind"] != "chat")
        return _json({"object": "list", "data": models})

    async def get_one(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}; ids may contain slashes."""
        principal = self._admitted(request)
        name = path_rest(request, "/v1/models/")
        return _json(self._shown(name, self._directory.model(principal, name), principal))

    def _admitted(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.MODELS)
        return principal

    def _shown(self, name: str, model: control.Model, principal: Principal) -> dict[str, object]:
        directory = self._directory
        pool = joined([self._pools.status(it) for it in directory.pool_ids(model)])
        limits = caller_limits(principal, model.id)
        return {
            "id": name,
            "object": "model",
            "created": model.created_at_unix_s,
            "owned_by": "sluice" if not model.owner_tenant_id else principal.tenant.id,
            "kind": "chat" if directory.generates_text(model) else "embedding",
            "stands_for": model.id,
            "release": model.release or None,
            "is_adapter": bool(model.adapter_digest),
            "context_window": directory.context_tokens_max(principal, model) or None,
            "readiness": pool.readiness,
            "capacity": pool.told,
            "limits": {name: limits.get(name) for name in METERED_NAMES},
        }


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type=_JSON)
