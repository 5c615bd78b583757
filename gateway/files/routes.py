"""The routes of `/v1/files`, which stores inputs and outputs of batches."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import orjson
from aiohttp import BodyPartReader, MultipartReader, hdrs, web

from gateway.bodies.mistakes import bad_value
from gateway.directory import Directory
from gateway.files.store import FILE_BYTES_MAX, FileStore
from gateway.records.pages import listed, page_of
from gateway.server.errors import HttpError
from gateway.server.identity import identity_of
from gateway.server.middleware import authenticate
from gateway.server.routes import Routes, path_rest
from gateway.server.unknown_urls import unknown_url
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.scopes import Scope

PATH = "/v1/files"
_PREFIX, _CONTENT = f"{PATH}/", "/content"
_JSON = "application/json"
_KNOWN = (PATH, f"{PATH}/{{id}}", f"{PATH}/{{id}}{_CONTENT}")
_PURPOSE = "batch"
_PIECE_BYTES, _FIELD_BYTES_MAX, _FIELDS_MAX = 64 << 10, 1024, 8
_NAME_CHARACTERS_MAX = 200
_PIECE_S, _WRITE_S = 30.0, 30.0
_UPLOADS_MAX = 8  # concurrent uploads in one worker, each of which uses 2 MiB of memory
_BROKEN = (
    "The multipart form is broken: send it as curl -F purpose=batch -F file=@batch.jsonl does, with"
    " the boundary of its Content-Type before each part and after the last one."
)
_Piece = TypeVar("_Piece")


class TenantFiles:
    """Routes of `/v1/files` in one worker, for all tenants."""

    def __init__(self, directory: Directory, store: FileStore) -> None:
        """`directory` authenticates callers, and `store` stores their files."""
        self._directory, self._store = directory, store
        self._uploads = asyncio.Semaphore(_UPLOADS_MAX)

    def add_to(self, routes: Routes) -> None:
        """Add the paths of all routes."""
        routes.add("POST", PATH, self.create)
        routes.add("GET", PATH, self.list_all)
        routes.add("GET", f"{PATH}/*", self.get)
        routes.add("DELETE", f"{PATH}/*", self.delete)

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/files, whose multipart form has `purpose` before `file`."""
        tenant_id = self._tenant(request)
        if not request.content_type.startswith("multipart/form-data"):
            raise bad_value("file", "send a multipart form with 'purpose' and 'file'")
        async with self._uploads:
            try:
                told = await self._received(tenant_id, await request.multipart())
            except (ValueError, web.RequestPayloadError, AssertionError) as error:
                if isinstance(error, PlatformError):
                    raise
                raise HttpError(400, _BROKEN) from None
        return _answer(told)

    async def _received(self, tenant_id: str, form: MultipartReader) -> dict[str, object]:
        purpose = ""
        for _ in range(_FIELDS_MAX):
            field = await _in_time(form.next())
            if field is None:
                raise bad_value("file", "it is missing from the form")
            if not isinstance(field, BodyPartReader):
                raise bad_value("file", "a form has no form within")
            if field.name == "purpose":
                purpose = await _text(field)
                if purpose != _PURPOSE:
                    raise bad_value(
                        "purpose", f"it must be '{_PURPOSE}': files are for batches here"
                    )
            elif field.name == "file":
                if not purpose:
                    raise bad_value("purpose", "send it before the file")
                name = (field.filename or "file.jsonl")[:_NAME_CHARACTERS_MAX]
                return await self._store.write(tenant_id, name, purpose, _bounded(field))
            else:
                raise bad_value((field.name or "")[:100], "it is not known here")
        raise bad_value("file", "it is missing from the form")

    async def list_all(self, request: web.Request) -> web.Response:
        """GET /v1/files."""
        tenant_id = self._tenant(request)
        limit, is_ascending, after = page_of(request, "purpose")
        if request.query.get("purpose", _PURPOSE) != _PURPOSE:
            return web.Response(body=listed([], has_more=False), content_type=_JSON)
        found = await self._store.listed(
            tenant_id, limit + 1, is_ascending=is_ascending, after=after
        )
        body = listed(found[:limit], has_more=len(found) > limit)
        return web.Response(body=body, content_type=_JSON)

    async def get(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/files/{id}, and /v1/files/{id}/content."""
        tenant_id, rest = self._tenant(request), path_rest(request, _PREFIX)
        if rest.endswith(_CONTENT):
            return await self._content(request, tenant_id, _one(request, rest[: -len(_CONTENT)]))
        return _answer(await self._store.show(tenant_id, _one(request, rest)))

    async def _content(
        self, request: web.Request, tenant_id: str, file_id: str
    ) -> web.StreamResponse:
        told = await self._store.show(tenant_id, file_id)
        headers = {
            hdrs.CONTENT_TYPE: "application/octet-stream",
            hdrs.CONTENT_LENGTH: str(told["bytes"]),
            **identity_of(request).headers,
        }
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        async for part in self._store.content(tenant_id, file_id):
            async with asyncio.timeout(_WRITE_S):
                await response.write(part)
        await response.write_eof()
        return response

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/files/{id}."""
        tenant_id = self._tenant(request)
        file_id = _one(request, path_rest(request, _PREFIX))
        await self._store.remove(tenant_id, file_id)
        return _answer({"id": file_id, "object": "file", "deleted": True})

    def _tenant(self, request: web.Request) -> str:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        return principal.tenant.id


async def _in_time(piece: Awaitable[_Piece]) -> _Piece:
    """Return the next piece of a form.

    Raises HttpError 408 if the piece does not arrive within `_PIECE_S` seconds.
    """
    try:
        async with asyncio.timeout(_PIECE_S):
            return await piece
    except TimeoutError:
        text = (
            f"The file came too slowly: no further byte for {_PIECE_S:g} s. Send it again, or in"
            " several smaller files."
        )
        raise HttpError(408, text) from None


async def _text(field: BodyPartReader) -> str:
    text = await _in_time(field.read_chunk(_FIELD_BYTES_MAX))
    if not field.at_eof():
        raise bad_value(field.name or "", "it is too long")
    return text.decode(errors="replace")


async def _bounded(field: BodyPartReader) -> AsyncIterator[bytes]:
    """Yield the pieces of a file.

    Raises BadRequestError if the file is too large, and HttpError 408 if a piece arrives too late.
    """
    size = 0
    while True:
        piece = await _in_time(field.read_chunk(_PIECE_BYTES))
        if not piece:
            return
        size += len(piece)
        if size > FILE_BYTES_MAX:
            text = f"A file has at most {FILE_BYTES_MAX >> 20} MiB; send several."
            raise BadRequestError(ErrorCode.REQUEST_TOO_LARGE, text, param="file")
        yield piece


def _one(request: web.Request, file_id: str) -> str:
    """Return the file id of a path, or raise PlatformError NOT_FOUND if the path has none."""
    if "/" in file_id or not file_id:
        raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(request.path, _KNOWN))
    return file_id


def _answer(told: dict[str, object]) -> web.Response:
    return web.Response(body=orjson.dumps(told), content_type=_JSON)
