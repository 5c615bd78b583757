"""The routes of `/v1/batches`, which run files of requests in the background."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from gateway.batches.client import BatchClient
from gateway.bodies.batches import BatchRequest
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import parse
from gateway.directory import Directory, Principal
from gateway.endpoints.reading import read_parsed
from gateway.files.store import FileStore
from gateway.records.pages import listed, page_of
from gateway.server.middleware import authenticate
from gateway.server.routes import Routes, path_rest
from gateway.server.unknown_urls import unknown_url
from sluice.errors import ErrorCode, PlatformError
from sluice.scopes import Scope
from sluice.wire.state.v1 import state_pb2 as wire

PATH = "/v1/batches"
_PREFIX, _CANCEL = f"{PATH}/", "/cancel"
_JSON = "application/json"
_KNOWN = (PATH, f"{PATH}/{{id}}", f"{PATH}/{{id}}{_CANCEL}")
_WINDOW_MS = 86_400_000
_ENDED = frozenset({"completed", "cancelled", "expired"})
# OpenAI's names of those statuses that have another name in the control plane.
_STATUSES = {"expiring": "finalizing"}
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Batches:
    """Routes of `/v1/batches` in one worker, for all tenants."""

    def __init__(
        self,
        directory: Directory,
        client: BatchClient,
        files: FileStore,
        on_begun: Callable[[], None],
    ) -> None:
        """Store the parts. `on_begun` is called after each new batch has been stored."""
        self._directory, self._client, self._files = directory, client, files
        self._on_begun = on_begun

    def add_to(self, routes: Routes) -> None:
        """Add the paths of all routes."""
        routes.add("POST", PATH, self.create)
        routes.add("GET", PATH, self.list_all)
        routes.add("GET", f"{PATH}/*", self.get)
        routes.add("POST", f"{PATH}/*", self.post)

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/batches."""
        principal = authenticate(self._directory, request)
        wanted = await read_parsed(request, partial(parse, BatchRequest))
        is_embedding = wanted.endpoint.endswith("embeddings")
        scope = Scope.EMBEDDINGS if is_embedding else Scope.CHAT
        self._directory.require_scope(principal, scope)
        tenant_id = principal.tenant.id
        file = await self._files.show(tenant_id, wanted.input_file_id, "input_file_id")
        if file["status"] != "processed" or file["purpose"] != "batch":
            raise bad_value("input_file_id", "it is a whole file with the purpose 'batch'")
        now_ms = time.time_ns() // 1_000_000
        batch = wire.Batch(
            id=self._client.new_id(tenant_id),
            tenant_id=tenant_id,
            key_id=principal.key.id,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            created_at_unix_ms=now_ms,
            expires_at_unix_ms=now_ms + _WINDOW_MS,
            metadata=wanted.metadata or {},
        )
        begun = await self._client.begin(batch)
        self._on_begun()
        return _answer(begun)

    async def list_all(self, request: web.Request) -> web.Response:
        """GET /v1/batches. The newest batch is first."""
        tenant_id = self._authorise(request).tenant.id
        limit, is_ascending, after = page_of(request)
        if is_ascending:
            raise bad_value("order", "batches are listed from the newest one on")
        found = await self._client.listed(tenant_id, limit + 1, after)
        told = [batch_object(batch) for batch in found]
        body = listed(told[:limit], has_more=len(told) > limit)
        return web.Response(body=body, content_type=_JSON)

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/batches/{id}."""
        tenant_id = self._authorise(request).tenant.id
        batch_id = _batch_id(request, path_rest(request, _PREFIX))
        return _answer(await self._client.show(tenant_id, batch_id))

    async def post(self, request: web.Request) -> web.Response:
        """POST /v1/batches/{id}/cancel."""
        tenant_id, rest = self._authorise(request).tenant.id, path_rest(request, _PREFIX)
        if not rest.endswith(_CANCEL):
            raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))
        batch_id = _batch_id(request, rest[: -len(_CANCEL)])
        return _answer(await self._client.cancel(tenant_id, batch_id))

    def _authorise(self, request: web.Request) -> Principal:
        return authenticate(self._directory, request)


def _batch_id(request: web.Request, batch_id: str) -> str:
    """Return the id if a path names a batch, or raise PlatformError NOT_FOUND."""
    if "/" in batch_id or not batch_id:
        raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))
    return batch_id


def batch_object(batch: wire.Batch) -> dict[str, Any]:
    """Return a batch in the API's form."""
    has_ended = batch.status in _ENDED
    mistakes = orjson.loads(batch.errors) if batch.errors else None
    reached = {f"{it}_at": _seconds(batch.reached_at_unix_ms.get(it)) for it in _TIMES}
    told: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": None if mistakes is None else {"object": "list", "data": mistakes},
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": _STATUSES.get(batch.status, batch.status),
        "output_file_id": (batch.output_file_id or None) if has_ended else None,
        "error_file_id": (batch.error_file_id or None) if has_ended else None,
        "created_at": batch.created_at_unix_ms // 1000,
        "expires_at": batch.expires_at_unix_ms // 1000,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": dict(batch.metadata),
    }
    return told | reached


def _seconds(unix_ms: int | None) -> int | None:
    return None if unix_ms is None else unix_ms // 1000


def _answer(batch: wire.Batch) -> web.Response:
    return web.Response(body=orjson.dumps(batch_object(batch)), content_type=_JSON)
