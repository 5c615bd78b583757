"""Routes that show, follow, list, cancel and delete stored responses."""

import asyncio

import orjson
from aiohttp import web

from gateway.bodies.mistakes import bad_value, unsupported
from gateway.directory import Directory, Principal
from gateway.limits.valkey_commands import ValkeyDownError
from gateway.records.pages import INCLUDE, check_included, listed, page_of
from gateway.responses.following import Following
from gateway.responses.hot_store import Found
from gateway.responses.store import ResponseStore
from gateway.server.middleware import authenticate
from gateway.server.routes import path_rest
from gateway.server.unknown_urls import unknown_url
from sluice.errors import BadRequestError, ErrorCode, PlatformError, RejectedError
from sluice.scopes import Scope

PREFIX = "/v1/responses/"
_INPUT_ITEMS, _CANCEL = "/input_items", "/cancel"
_JSON = "application/json"
_KNOWN = (
    *("/v1/responses", "/v1/responses/{id}", "/v1/responses/{id}/input_items"),
    "/v1/responses/{id}/cancel",
)
_CANCEL_S, _CANCEL_POLL_S = 10.0, 0.05
_SHOWN = {"stream", "starting_after", "include_obfuscation", *INCLUDE}


class StoredResponses:
    """Endpoints that read and delete stored responses by their ids."""

    def __init__(self, *, directory: Directory, store: ResponseStore) -> None:
        """Both arguments are parts of the same worker.

        Args:
            directory: Keys and tenants.
            store: Store of the responses.
        """
        self._directory = directory
        self._store = store
        self._following = Following(store)

    async def get(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}, and /v1/responses/{id}/input_items."""
        principal = self._authorise(request)
        rest = path_rest(request, PREFIX)
        if rest.endswith(_INPUT_ITEMS):
            response_id = rest.removesuffix(_INPUT_ITEMS)
            return await self._input_items(request, principal, _response_id(request, response_id))
        response_id = _response_id(request, rest)
        is_stream, behind = _stream_query(request)
        if is_stream:
            return await self._following.answer(request, principal.tenant.id, response_id, behind)
        found = await self._store.find(principal.tenant.id, response_id)
        body = found.under_way if found.stored is None else found.stored.response
        return web.Response(body=body, content_type=_JSON)

    async def post(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/cancel."""
        principal = self._authorise(request)
        rest = path_rest(request, PREFIX)
        if not rest.endswith(_CANCEL):
            raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))
        response_id = _response_id(request, rest.removesuffix(_CANCEL))
        tenant_id = principal.tenant.id
        found = await self._store.find(tenant_id, response_id)
        if found.stored is None:
            _require_background(response_id, found.under_way)
            found = await self._cancelled(tenant_id, response_id)
        body = b"" if found.stored is None else found.stored.response
        _require_background(response_id, body)
        return web.Response(body=body, content_type=_JSON)

    async def _cancelled(self, tenant_id: str, response_id: str) -> Found:
        """Cancel a response and return its final state.

        Raises RejectedError if the response does not end within `_CANCEL_S` seconds.
        """
        try:
            await self._store.background.cancel(response_id)
            async with asyncio.timeout(_CANCEL_S):
                while True:
                    found = await self._store.find(tenant_id, response_id)
                    if found.stored is not None:
                        return found
                    await asyncio.sleep(_CANCEL_POLL_S)
        except (ValkeyDownError, TimeoutError):
            text = f"Response '{response_id}' is about to be cancelled; get it again shortly."
            raise RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=2.0) from None

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/responses/{id}."""
        principal = self._authorise(request)
        response_id = _response_id(request, path_rest(request, PREFIX))
        await self._store.delete(principal.tenant.id, response_id)
        told = {"id": response_id, "object": "response", "deleted": True}
        return web.Response(body=orjson.dumps(told), content_type=_JSON)

    async def _input_items(
        self, request: web.Request, principal: Principal, response_id: str
    ) -> web.Response:
        limit, is_ascending, after = page_of(request, *INCLUDE)
        check_included(request)
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
                raise bad_value("after", "this response has no item with this id")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        return web.Response(body=listed(page, has_more=len(items) > len(page)), content_type=_JSON)

    def _authorise(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        return principal


def _response_id(request: web.Request, response_id: str) -> str:
    """Return the response id of a path, or raise NOT_FOUND if the path has none."""
    if "/" in response_id or not response_id:
        raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))
    return response_id


def _require_background(response_id: str, response: bytes) -> None:
    if not orjson.loads(response)["background"]:
        text = (
            f"Response '{response_id}' is not in the background: it cannot be cancelled. Close"
            " its connection to end it."
        )
        raise BadRequestError(ErrorCode.INVALID_REQUEST, text)


def _stream_query(request: web.Request) -> tuple[bool, int | None]:
    """Return whether a stream is requested, and the number of the event that it continues after."""
    query = request.query
    if unknown := query.keys() - _SHOWN:
        raise bad_value(min(unknown), "this parameter is unknown; leave it out")
    check_included(request)
    if query.get("include_obfuscation", "false") != "false":
        raise unsupported("include_obfuscation", "leave it out, or send 'false'")
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise bad_value("stream", "send 'true' or 'false'")
    if after is None:
        return stream == "true", None
    if stream != "true":
        raise bad_value("starting_after", "it needs 'stream=true'")
    if not (after.isascii() and after.isdigit() and len(after) < 10):
        raise bad_value("starting_after", "send the 'sequence_number' of an event")
    return True, int(after)
