"""The routes of `/v1/conversations`, and of the items in each conversation."""

from functools import partial
from typing import Any

import orjson
from aiohttp import web

from gateway.bodies.conversations import AddedItems, ConversationRequest, MetadataChange
from gateway.bodies.parsing import parse
from gateway.conversations.store import ConversationStore, new_items
from gateway.directory import Directory
from gateway.endpoints.reading import read_parsed
from gateway.records.pages import INCLUDE, check_included, listed, page_of
from gateway.server.middleware import authenticate
from gateway.server.routes import Routes, path_rest
from gateway.server.unknown_urls import unknown_url
from sluice.errors import ErrorCode, PlatformError
from sluice.scopes import Scope
from sluice.wire.state.v1 import state_pb2 as wire

PATH = "/v1/conversations"
_PREFIX = f"{PATH}/"
_JSON = "application/json"
_KNOWN = (
    *(PATH, f"{PATH}/{{id}}", f"{PATH}/{{id}}/items"),
    f"{PATH}/{{id}}/items/{{item_id}}",
)
_ITEMS = "items"


class Conversations:
    """Routes of `/v1/conversations` in one worker, for all tenants."""

    def __init__(self, directory: Directory, store: ConversationStore) -> None:
        """Store the directory and the store of conversations."""
        self._directory, self._store = directory, store

    def add_to(self, routes: Routes) -> None:
        """Add the paths of all routes."""
        routes.add("POST", PATH, self.create)
        routes.add("GET", f"{PATH}/*", self.get)
        routes.add("POST", f"{PATH}/*", self.post)
        routes.add("DELETE", f"{PATH}/*", self.delete)

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/conversations."""
        tenant_id = self._tenant(request)
        wanted = await read_parsed(request, partial(parse, ConversationRequest))
        record = await self._store.begin(tenant_id, wanted.items or (), wanted.metadata or {})
        return _answer(_document(record))

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/conversations/{id}, its items, or one of its items."""
        tenant_id, (conversation_id, *rest) = self._tenant(request), _place(request)
        match rest:
            case []:
                return _answer(_document(await self._store.show(tenant_id, conversation_id)))
            case [_]:
                limit, is_ascending, after = page_of(request, *INCLUDE)
                check_included(request)
                items = await self._store.page(
                    tenant_id, conversation_id, limit + 1, is_ascending=is_ascending, after=after
                )
                body = listed(items[:limit], has_more=len(items) > limit)
                return web.Response(body=body, content_type=_JSON)
            case _:
                check_included(request)
                return _answer(await self._store.item(tenant_id, conversation_id, rest[1]))

    async def post(self, request: web.Request) -> web.Response:
        """Replace the metadata (POST /v1/conversations/{id}), or add items (POST .../items)."""
        tenant_id, (conversation_id, *rest) = self._tenant(request), _place(request)
        if not rest:
            change = await read_parsed(request, partial(parse, MetadataChange))
            record = await self._store.change(tenant_id, conversation_id, change.metadata)
            return _answer(_document(record))
        if len(rest) > 1:
            raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))
        check_included(request)
        added = await read_parsed(request, partial(parse, AddedItems))
        items = new_items(added.items)
        await self._store.append(tenant_id, conversation_id, items, _ITEMS)
        return web.Response(body=listed(items, has_more=False), content_type=_JSON)

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/conversations/{id}, or one of its items."""
        tenant_id, (conversation_id, *rest) = self._tenant(request), _place(request)
        match rest:
            case []:
                await self._store.remove(tenant_id, conversation_id)
                told = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
                return _answer(told)
            case [_, item_id]:
                await self._store.remove_item(tenant_id, conversation_id, item_id)
                return _answer(_document(await self._store.show(tenant_id, conversation_id)))
            case _:
                raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))

    def _tenant(self, request: web.Request) -> str:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        return principal.tenant.id


def _place(request: web.Request) -> list[str]:
    """Return the parts of a path: a conversation's id, then `items` and an item's id if given."""
    parts = path_rest(request, _PREFIX).split("/")
    if not all(parts) or len(parts) > 3 or (len(parts) > 1 and parts[1] != _ITEMS):
        raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))
    return parts


def _document(record: wire.Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "conversation",
        "created_at": record.created_at_unix_ms // 1000,
        "metadata": dict(record.metadata),
    }


def _answer(told: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(told), content_type=_JSON)
