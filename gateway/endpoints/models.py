"""GET /v1/models and /v1/models/{id}, which show the models that a caller may use."""

from datetime import UTC, datetime
from typing import cast

import orjson
from aiohttp import web

from gateway.auto.decision import AUTO
from gateway.directory import Directory, Principal
from gateway.limits.caller import caller_limits
from gateway.pool_board import PoolBoard
from gateway.pool_status import PoolStatus, joined
from gateway.server.middleware import authenticate
from gateway.server.routes import path_rest
from sluice.errors import PlatformError
from sluice.limits import METERED_NAMES
from sluice.scopes import Scope
from sluice.wire.control.v1 import control_pb2 as control

_JSON = "application/json"
_ANTHROPIC = "anthropic-version"  # header that Anthropic's clients send


class Models:
    """The endpoints `/v1/models` and `/v1/models/{id}` of one worker."""

    def __init__(self, *, directory: Directory, pools: PoolBoard) -> None:
        """`pools` reports the state of each model's pool."""
        self._directory = directory
        self._pools = pools

    async def list_all(self, request: web.Request) -> web.Response:
        """GET /v1/models, sorted by name, chat models first. Many tools use the first model."""
        principal = self._admitted(request)
        found = self._directory.models(principal)
        auto = _auto_policy(principal, AUTO)
        models = [
            self._shown(public.name, public.model, principal)
            for public in found
            if auto is None or public.name != AUTO
        ]
        if auto is not None:
            # `auto` is the last chat model, so that tools that use the first name do not use it.
            models.append(self._shown_auto(principal, auto))
        models.sort(key=lambda shown: shown["kind"] != "chat")
        told: dict[str, object] = {"object": "list", "data": [_card(request, it) for it in models]}
        if _ANTHROPIC in request.headers:
            ids = [it["id"] for it in models] or [None]
            told |= {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
        return _json(told)

    async def get_one(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}, whose ids may contain slashes."""
        principal = self._admitted(request)
        name = path_rest(request, "/v1/models/")
        auto = _auto_policy(principal, name)
        if auto is not None:
            return _json(_card(request, self._shown_auto(principal, auto)))
        shown = self._shown(name, self._directory.model(principal, name), principal)
        return _json(_card(request, shown))

    def _admitted(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.MODELS)
        return principal

    def _shown(self, name: str, model: control.Model, principal: Principal) -> dict[str, object]:
        directory = self._directory
        pool = joined([self._pools.status(it) for it in directory.pool_ids(model)])
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
            **_state(pool, principal, model.id),
        }

    def _shown_auto(self, principal: Principal, policy: control.AutoPolicy) -> dict[str, object]:
        """Return the card of `auto`, with the largest context and the summed state of its pools."""
        directory = self._directory
        models = [
            model for told in policy.candidates for model in self._usable(principal, told.model)
        ]
        contexts = [directory.context_tokens_max(principal, model) for model in models]
        pools = sorted({pool_id for model in models for pool_id in directory.pool_ids(model)})
        return {
            "id": AUTO,
            "object": "model",
            "created": min([model.created_at_unix_s for model in models], default=0),
            "owned_by": principal.tenant.id,
            "kind": "chat",
            "stands_for": AUTO,
            "release": None,
            "is_adapter": False,
            "context_window": max(contexts, default=0) or None,
            **_state(joined([self._pools.status(it) for it in pools]), principal, ""),
        }

    def _usable(self, principal: Principal, name: str) -> list[control.Model]:
        """Return the model of a name, if the caller may use it and it generates text."""
        try:
            model = self._directory.model(principal, name)
        except PlatformError:
            return []
        return [model] if self._directory.generates_text(model) else []


def _card(request: web.Request, shown: dict[str, object]) -> dict[str, object]:
    """Return the card of a model, with Anthropic's fields for Anthropic's clients."""
    if _ANTHROPIC not in request.headers:
        return shown
    created = datetime.fromtimestamp(cast("int", shown["created"]), UTC)
    at = created.isoformat().replace("+00:00", "Z")
    return shown | {"type": "model", "display_name": shown["id"], "created_at": at}


def _state(pool: PoolStatus, principal: Principal, model_id: str) -> dict[str, object]:
    limits = caller_limits(principal, model_id)
    return {
        "readiness": pool.readiness,
        "capacity": pool.figures,
        "limits": {name: limits.get(name) for name in METERED_NAMES},
    }


def _auto_policy(principal: Principal, name: str) -> control.AutoPolicy | None:
    return principal.auto_policy if name == AUTO else None


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type=_JSON)
