"""The endpoint POST /v1/chat/completions, and the routes of completions stored by `"store": true`.

`ToolAnswering` (`gateway/tools/answering.py`) answers, which is the `Completer` for one round.
"""

from functools import partial
from typing import Any

import orjson
from aiohttp import web

from gateway.bodies.conversations import MetadataChange
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import parse
from gateway.chat.compactor import ChatCompactor
from gateway.chat.keeper import KIND, CompletionKeeper
from gateway.chat.task import KeptChatTask
from gateway.chat.tool_planning import ChatToolPlanning
from gateway.chat.tool_task import ToolChatTask
from gateway.directory import Directory, Principal
from gateway.endpoints.chat_task import ChatTask
from gateway.endpoints.reading import read_parsed
from gateway.records.client import missing
from gateway.records.pages import listed, page_of
from gateway.records.sealed import SealedRecords
from gateway.server.middleware import authenticate
from gateway.server.routes import Routes, path_rest
from gateway.server.unknown_urls import unknown_url
from gateway.tools.answering import Answering
from sluice.errors import ErrorCode, PlatformError
from sluice.scopes import Scope
from sluice.wire.state.v1 import state_pb2 as wire

PATH = "/v1/chat/completions"
_PREFIX, _MESSAGES = f"{PATH}/", "/messages"
_JSON = "application/json"
_KNOWN = (PATH, f"{PATH}/{{id}}", f"{PATH}/{{id}}{_MESSAGES}")
_FILTERS_MAX = 16
# Seconds to wait until the queue is written, since a client may read its new completion at once.
_SETTLE_S = 1.0


class ChatCompletions:
    """Routes of one worker that create chat completions, and that read the stored ones."""

    def __init__(
        self,
        directory: Directory,
        answering: Answering,
        tools: ChatToolPlanning,
        chats: ChatCompactor,
        records: SealedRecords,
    ) -> None:
        """Create the queue of completions to store.

        Args:
            directory: Keys and tenants.
            answering: Generates the answers.
            tools: Plans the tools that run on the server.
            chats: Summarizes long chats.
            records: Store of completions.
        """
        self._directory, self._answering, self._tools = directory, answering, tools
        self._chats, self._records = chats, records
        self.keeper = CompletionKeeper(records)

    def add_to(self, routes: Routes) -> None:
        """Add the paths of all routes."""
        routes.add("POST", PATH, self.create)
        routes.add("GET", PATH, self.list_all)
        routes.add("GET", f"{PATH}/*", self.get)
        routes.add("POST", f"{PATH}/*", self.change)
        routes.add("DELETE", f"{PATH}/*", self.delete)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        principal = self._authorise(request)
        # The parsed body has no variable, so that its memory is freed while the answer streams.
        return await self._answering.answer(
            request,
            principal,
            await self._task(
                request, principal, await read_parsed(request, partial(parse, ChatTask))
            ),
        )

    async def _task(self, request: web.Request, principal: Principal, wanted: ChatTask) -> ChatTask:
        """Return a request's task, with server tools, compaction and storage as requested."""
        tenant_id = principal.tenant.id
        task = self._chats.expanded(tenant_id, wanted)
        if task.has_server_tools:
            task = await self._tools.task(principal, task)
        compaction = None
        if task.compaction_policy is not None:
            task, compaction = await self._chats.shortened(request, principal, task)
        keeper = self.keeper if wanted.store else None
        is_tool_task = isinstance(task, ToolChatTask)
        if keeper is None and compaction is None and not is_tool_task:
            return task  # the usual case
        more: dict[str, Any] = {
            "keeper": keeper,
            "tenant_id": tenant_id,
            "sent": wanted.messages,
            "compaction": compaction,
        }
        if is_tool_task:
            return task.model_copy(update=more)
        fields = {name: getattr(task, name) for name in ChatTask.model_fields}
        return KeptChatTask.model_construct(**fields, **more)

    async def list_all(self, request: web.Request) -> web.Response:
        """GET /v1/chat/completions. Returns stored completions, the oldest first."""
        tenant_id = self._authorise(request).tenant.id
        filters = {key: value for key, value in request.query.items() if key.startswith("metadata")}
        limit, is_ascending, after = page_of(request, "model", *filters, default_order="asc")
        await self.keeper.settled(_SETTLE_S)
        wanted = wire.ListRecordsRequest(
            tenant_id=tenant_id,
            kind=KIND,
            after=after,
            limit=limit + 1,
            is_ascending=is_ascending,
            metadata=_metadata(filters),
            model=request.query.get("model", ""),
        )
        found = [_document(record) for record in await self._records.listed(wanted)]
        body = listed(found[:limit], has_more=len(found) > limit)
        return web.Response(body=body, content_type=_JSON)

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/chat/completions/{id}, or the messages of the completion."""
        tenant_id, rest = self._authorise(request).tenant.id, path_rest(request, _PREFIX)
        await self.keeper.settled(_SETTLE_S)
        completion_id = _completion_id(request, rest.removesuffix(_MESSAGES))
        record = await self._record(tenant_id, completion_id)
        if not rest.endswith(_MESSAGES):
            return _answer(_document(record))
        limit, is_ascending, after = page_of(request, default_order="asc")
        wanted = wire.ListItemsRequest(
            tenant_id=tenant_id,
            id=completion_id,
            after=after,
            limit=limit + 1,
            is_ascending=is_ascending,
        )
        found = [orjson.loads(it.content) async for it in self._records.items(wanted)]
        body = listed(found[:limit], has_more=len(found) > limit)
        return web.Response(body=body, content_type=_JSON)

    async def change(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions/{id}. Replaces the metadata."""
        tenant_id = self._authorise(request).tenant.id
        completion_id = _completion_id(request, path_rest(request, _PREFIX))
        change = await read_parsed(request, partial(parse, MetadataChange))
        await self.keeper.settled(_SETTLE_S)
        await self._record(tenant_id, completion_id)
        record = await self._records.change(tenant_id, completion_id, change.metadata)
        return _answer(_document(record))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/chat/completions/{id}."""
        tenant_id = self._authorise(request).tenant.id
        completion_id = _completion_id(request, path_rest(request, _PREFIX))
        await self.keeper.settled(_SETTLE_S)
        await self._record(tenant_id, completion_id)
        await self._records.remove(tenant_id, completion_id)
        return _answer({"id": completion_id, "object": f"{KIND}.deleted", "deleted": True})

    async def _record(self, tenant_id: str, completion_id: str) -> wire.Record:
        record = await self._records.show(tenant_id, completion_id)
        if record.kind != KIND:
            raise missing(completion_id)
        return record

    def _authorise(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        return principal


def _metadata(filters: dict[str, str]) -> dict[str, str]:
    """Return the metadata of the wanted records, from parameters `metadata[key]=value`."""
    if len(filters) > _FILTERS_MAX:
        raise bad_value("metadata", f"send at most {_FILTERS_MAX} filters")
    wanted = dict[str, str]()
    for name, value in filters.items():
        key = name.removeprefix("metadata[")
        if key == name or not key.endswith("]"):
            raise bad_value(name, "it is metadata[key]=value")
        wanted[key[:-1]] = value
    return wanted


def _completion_id(request: web.Request, completion_id: str) -> str:
    """Return the id if a path names a completion, or raise PlatformError NOT_FOUND."""
    if "/" in completion_id or not completion_id:
        raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))
    return completion_id


def _document(record: wire.Record) -> dict[str, Any]:
    return orjson.loads(record.content) | {"metadata": dict(record.metadata)}


def _answer(told: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(told), content_type=_JSON)
