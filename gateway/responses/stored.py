"""Responses that are kept: shown, listed and deleted."""

import orjson
from aiohttp import web

from gateway.bodies.mistakes import bad_value, unsupported
from gateway.directory import Directory, Principal
from gateway.responses.store import ResponseStore
from gateway.server.middleware import authenticate
from gateway.server.routes import path_rest
from gateway.server.unknown_urls import unknown_url
from sluice.errors import ErrorCode, PlatformError
from sluice.scopes import Scope

PREFIX = "/v1/responses/"
_INPUT_ITEMS = "/input_items"
_LIMIT, _LIMIT_MAX = 20, 100
_JSON = "application/json"
_KNOWN = ("/v1/responses", "/v1/responses/{id}", "/v1/responses/{id}/input_items")


class StoredResponses:
    """What is asked of responses by their ids."""

    def __init__(self, *, directory: Directory, store: ResponseStore) -> None:
        """Compose.

        Args:
            directory: Knows who calls.
            store: Has the responses.
        """
        self._directory = directory
        self._store = store

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/responses/{id}, and /v1/responses/{id}/input_items."""
        principal = self._admitted(request)
        rest = path_rest(request, PREFIX)
        if rest.endswith(_INPUT_ITEMS):
            response_id = rest.removesuffix(_INPUT_ITEMS)
            return await self._input_items(request, principal, _one(request, response_id))
        response_id = _one(request, rest)
        if request.query.get("stream", "false") != "false":
            raise unsupported("stream", "a response that has ended is told whole")
        found = await self._store.find(principal.tenant.id, response_id)
        body = found.under_way if found.stored is None else found.stored.response
        return web.Response(body=body, content_type=_JSON)

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/responses/{id}."""
        principal = self._admitted(request)
        response_id = _one(request, path_rest(request, PREFIX))
        await self._store.delete(principal.tenant.id, response_id)
        told = {"id": response_id, "object": "response", "deleted": True}
        return web.Response(body=orjson.dumps(told), content_type=_JSON)

    async def _input_items(
        self, request: web.Request, principal: Principal, response_id: str
    ) -> web.Response:
        limit, is_ascending, after = _page(request)
        found = await self._store.find(principal.tenant.id, response_id)
        if found.stored is None:
            text = f"Response '{response_id}' is still under way: ask again when it has ended."
            raise PlatformError(ErrorCode.CONFLICT, text)
        items: list[dict[str, object]] = orjson.loads(found.stored.input_items)
        if not is_ascending:
            items.reverse()
        if after:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise bad_value("after", "no item of this response has this id")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        told = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
        return web.Response(body=orjson.dumps(told), content_type=_JSON)

    def _admitted(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        return principal


def _one(request: web.Request, response_id: str) -> str:
    """Return the id that a path names; PlatformError when it names something else."""
    if "/" in response_id or not response_id:
        raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))
    return response_id


def _page(request: web.Request) -> tuple[int, bool, str]:
    """Return how many items are wanted, whether the oldest come first, and behind which one."""
    query = request.query
    if unknown := query.keys() - {"limit", "order", "after", "include"}:
        raise bad_value(min(unknown), "it is not known here")
    text = query.get("limit", str(_LIMIT))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:4]) <= _LIMIT_MAX:
        raise bad_value("limit", f"it is a number from 1 to {_LIMIT_MAX}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_value("order", "it is 'asc' or 'desc'")
    return int(text), order == "asc", query.get("after", "")
