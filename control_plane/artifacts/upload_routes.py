"""REST of uploads. A client begins with a manifest, sends the missing chunks, and completes.

All steps can be repeated at any time. A repeated request to begin continues the live upload.
"""

import asyncio
import json
from typing import Any

from aiohttp import web
from sqlalchemy import select

from control_plane.access.roles import Action, Actor
from control_plane.artifacts import catalogue, uploads
from control_plane.artifacts.bodies import ImportBody, UploadBody
from control_plane.artifacts.model import LIVE_STATES, UPLOADS_MAX, Kind, UploadState, quota_problem
from control_plane.artifacts.service import Artifacts
from control_plane.artifacts.sources import ImportSourceError, parse_source
from control_plane.artifacts.tables import artifact_uploads
from control_plane.artifacts.uploads import NewUpload
from control_plane.database import Database
from control_plane.fields import checked_digest
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.columns import columns
from control_plane.http.resources import lock_id, page, shown, visible
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import RECORDED, Write, WriteReply, Writes
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.manifests import MANIFEST_BYTES_MAX, Manifest, ManifestError, parse_manifest

Values = dict[str, Any]
_KIND = "uploads"
# Seconds to wait for the end of an upload. Clients wait at least 10 s, and then poll.
_WAIT_S = 8.0
_POLL_S = 0.1
_BEGIN_S = 20.0  # Deadline in seconds. A large base has tens of thousands of chunks.
SHOWN = (
    *("id", "tenant_id", "digest", "kind", "base_digest", "source", "state", "reasons"),
    *("size_bytes", "created_at"),
)

_MISSING = describe.shown(("sha256", "size_bytes"), types={"size_bytes": describe.INTEGER})


class UploadRoutes:
    """The request handlers of uploads."""

    def __init__(self, database: Database, service: Artifacts) -> None:
        self._database = database
        self._service = service
        self._writes = Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        every, read, write = "/v1/artifacts/uploads", Action.READ_TENANT, Action.WRITE_ARTIFACTS
        one = f"{every}/{{id}}"
        row = shown_upload("missing", missing={"type": "array", "items": _MISSING})
        listing = describe.listing("List uploads", shown_upload())
        begin = describe.operation(
            "Begin an upload (201), or go on with it (200)",
            answer=row,
            body=UploadBody,
            also=(201,),
        )
        fetch = describe.operation(
            "Import from a URI (200 accepted, 202 not yet)",
            answer=row,
            body=ImportBody,
            also=(202,),
        )
        show = describe.operation("Show an upload, and the chunks that it lacks", answer=row)
        piece = describe.operation("Send a chunk that an upload lacks")
        complete = describe.operation(
            "Complete an upload: check it, then accept it (200 accepted, 202 not yet)",
            answer=row,
            also=(202,),
        )
        cancel = describe.operation("Cancel an upload or import that is under way", answer=row)
        return [
            AdminRoute("POST", every, self.begin, write, _KIND, begin),
            AdminRoute("POST", "/v1/artifacts/imports", self.fetch, write, _KIND, fetch),
            AdminRoute("GET", every, self.list, read, _KIND, listing),
            AdminRoute("GET", one, self.get, read, _KIND, show),
            AdminRoute(
                *("PUT", f"{one}/chunks/{{chunk}}", self.put, write, _KIND, piece),
                is_audited=False,
            ),
            AdminRoute("POST", f"{one}/complete", self.complete, write, _KIND, complete),
            AdminRoute("POST", f"{one}/cancel", self.cancel, write, _KIND, cancel),
        ]

    async def begin(self, request: web.Request) -> web.Response:
        """Begin an upload with its manifest, or continue the live upload of the same content."""
        # Manifests of large bases exceed the body limit of other routes.
        large = request.clone(client_max_size=MANIFEST_BYTES_MAX)
        body = await read_body(large, UploadBody)
        try:
            manifest = await asyncio.to_thread(parse_manifest, body.manifest)
        except ManifestError as error:
            message = f"manifest: {error}"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="manifest") from None
        tenant_id = body.tenant_id or request[ACTOR].tenant_id or None
        new = NewUpload(tenant_id, body.kind, body.base_digest, "", body.signatures)
        self._service.require_store()

        async def work(write: Write) -> WriteReply:
            return await self._begin(write, new, manifest)

        answer = await self._writes.run(large, work, deadline_s=_BEGIN_S)
        request[RECORDED] = large[RECORDED]
        return answer

    async def fetch(self, request: web.Request) -> web.Response:
        """Begin or continue an import, and wait a few seconds for its end."""
        body = await read_body(request, ImportBody)
        tenant_id = body.tenant_id or request[ACTOR].tenant_id or None
        new = NewUpload(tenant_id, body.kind, body.base_digest, body.source, body.signatures)
        return _ended(await self.bring(request, new))

    async def bring(self, request: web.Request, new: NewUpload) -> Values:
        """Begin or continue an import, and return it at its end, or unfinished after 8 seconds.

        Raises:
            PlatformError: The source is not allowed, or the import was refused.
        """
        try:
            parse_source(new.source, self._service.allowed)
        except ImportSourceError as error:
            message = f"source: {error}"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="source") from None
        self._service.require_store()
        begun: list[str] = []

        async def work(write: Write) -> WriteReply:
            answer = await self._begin(write, new, None)
            begun[:] = [answer.object_id]
            return answer

        answer = await self._writes.run(request, work)
        # The stored answer of the idempotency key contains the id of the upload as well.
        upload_id = begun[0] if begun else str(json.loads(answer.text or "{}")["id"])
        self._service.wake()
        return _checked(await self._wait(request, upload_id))

    async def _begin(self, write: Write, new: NewUpload, manifest: Manifest | None) -> WriteReply:
        write.require(new.tenant_id)
        connection = write.connection
        await connection.execute(lock_id(_KIND, new.tenant_id or ""))
        found = await uploads.find_live(connection, new, manifest)
        if found is None:
            await self._check(write, new, manifest)
            found = await uploads.create(connection, new, manifest)
            if problems := await uploads.wrong_sizes(connection, found["id"]):
                message = "\n".join(f"manifest: {problem}" for problem in problems)
                raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="manifest")
            after, status, verb = show_upload(found), 201, "create"
        else:
            after, status, verb = show_upload(found), 200, "continue"
            if new.signatures:
                await uploads.sign(connection, found["id"], new.signatures)
        before = after if status == 200 else None
        write.record(verb, found["id"], before, after, owners=[new.tenant_id], kind=_KIND)
        missing = await uploads.missing(connection, found["id"])
        return WriteReply(after | {"missing": missing}, found["id"], status)

    async def _check(self, write: Write, new: NewUpload, manifest: Manifest | None) -> None:
        """Refuse an upload that is too large or has an unknown base."""
        connection, tenant_id = write.connection, new.tenant_id
        if new.kind == Kind.ADAPTER:
            base = await catalogue.find(connection, tenant_id, new.base_digest)
            if base is None or base["kind"] != Kind.BASE:
                message = (
                    f"base_digest: {new.base_digest} is no base that was uploaded: do it first"
                )
                raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="base_digest")
        if tenant_id is None:
            return
        held, count = await uploads.held_bytes(connection, tenant_id)
        if count >= UPLOADS_MAX:
            message = f"{count} uploads of {tenant_id} are under way: complete or cancel one first"
            raise PlatformError(ErrorCode.CONFLICT, message)
        quota = self._service.bounds.tenant_bytes_max
        if problem := quota_problem(held, manifest.size_bytes if manifest else 0, quota):
            raise PlatformError(ErrorCode.REQUEST_TOO_LARGE, problem, param="manifest")

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of uploads, the newest first."""
        table = artifact_uploads
        query = visible(request, select(*(table.c[name] for name in SHOWN)), table.c.tenant_id)
        return await page(
            self._database, query, table.c.id, request, show_upload, newest_first=True
        )

    async def get(self, request: web.Request) -> web.Response:
        """Return one upload, with its missing chunks."""
        upload = await self._find(request, path_id(request))
        missing: Any = []
        if upload["state"] == UploadState.UPLOADING:
            missing = await self._database.run(
                lambda connection: uploads.missing(connection, upload["id"])
            )
        return shown(request, show_upload(upload) | {"missing": missing})

    async def put(self, request: web.Request) -> web.Response:
        """Store a chunk of an upload (204). The request can be repeated."""
        sha256 = path_id(request, "chunk", checked_digest)
        upload = await self._find(request, path_id(request))
        # another client of the tenant has already sent the last chunk
        if upload["state"] in _COMPLETE:
            return web.Response(status=204)
        if upload["state"] != UploadState.UPLOADING:
            raise _wrong_state(upload)
        size = await self._database.run(
            lambda connection: uploads.chunk_size(connection, upload["id"], sha256)
        )
        if size is None:
            message = (
                f"the manifest of upload {upload['id']} has no chunk {sha256}; send only its chunks"
            )
            raise PlatformError(ErrorCode.NOT_FOUND, message)
        await self._service.pieces.take(request, upload["id"], sha256, size)
        return web.Response(status=204)

    async def complete(self, request: web.Request) -> web.Response:
        """Request the inspection of an upload, and wait a few seconds for the result."""
        upload_id = path_id(request)

        async def work(write: Write) -> WriteReply:
            upload = await _locked(write, upload_id)
            before, after = show_upload(upload), show_upload(upload)
            if upload["state"] == UploadState.UPLOADING:
                if missing := await uploads.missing(write.connection, upload_id):
                    message = f"{len(missing)} chunks are missing: put them, then complete it"
                    raise PlatformError(ErrorCode.CONFLICT, message)
                await uploads.submit(write.connection, upload_id)
                after |= {"state": UploadState.VALIDATING}
            write.record("complete", upload_id, before, after, owners=[upload["tenant_id"]])
            return WriteReply(after, upload_id)

        await self._writes.run(request, work)
        self._service.wake()
        return _ended(_checked(await self._wait(request, upload_id)))

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a live upload. The request can be repeated."""
        upload_id = path_id(request)

        async def work(write: Write) -> WriteReply:
            upload = await _locked(write, upload_id)
            before, after = show_upload(upload), show_upload(upload)
            if upload["state"] in LIVE_STATES:
                await uploads.cancel(write.connection, upload_id)
                after |= {"state": UploadState.CANCELLED}
            elif upload["state"] != UploadState.CANCELLED:
                message = f"upload {upload_id} is {upload['state']}: it has ended already"
                raise PlatformError(ErrorCode.CONFLICT, message)
            write.record("cancel", upload_id, before, after, owners=[upload["tenant_id"]])
            return WriteReply(after | {"missing": []}, upload_id)

        return await self._writes.run(request, work)

    async def _wait(self, request: web.Request, upload_id: str) -> Values:
        """Return an upload when it has ended, or unfinished after a bounded wait."""
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    upload = await self._find(request, upload_id)
                    if upload["state"] not in LIVE_STATES:
                        return upload
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return await self._find(request, upload_id)

    async def _find(self, request: web.Request, upload_id: str) -> Values:
        """Return an upload. Raises NOT_FOUND if the caller may not do the route's action on it."""
        upload = await self._database.run(lambda connection: uploads.get(connection, upload_id))
        actor = request[ACTOR]
        if upload is not None:
            if request.method == "GET" and actor.may(Action.READ_TENANT, upload["tenant_id"]):
                return upload
            if _may_write(actor, upload):
                return upload
        raise _no_upload(upload_id)


_COMPLETE = frozenset({UploadState.VALIDATING, UploadState.READY})


def _may_write(actor: Actor, upload: Values) -> bool:
    return actor.may(Action.WRITE_ARTIFACTS, upload["tenant_id"])


async def _locked(write: Write, upload_id: str) -> Values:
    """Return an upload that the caller may change, with its row locked.

    Raises:
        PlatformError: There is no such upload.
    """
    upload = await uploads.get(write.connection, upload_id, is_locked=True)
    if upload is None or not _may_write(write.actor, upload):
        raise _no_upload(upload_id)
    return upload


def _no_upload(upload_id: str) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no upload {upload_id}")


def _wrong_state(upload: Values) -> PlatformError:
    message = f"upload {upload['id']} is {upload['state']}: it takes no more chunks"
    return PlatformError(ErrorCode.CONFLICT, message)


def _checked(upload: Values) -> Values:
    """Return an upload that was neither refused nor cancelled.

    Raises:
        BadRequestError: The upload was refused, for the reasons in the message.
        PlatformError: The upload was cancelled.
    """
    if upload["state"] == UploadState.CANCELLED:
        message = f"upload {upload['id']} is cancelled: begin it anew"
        raise PlatformError(ErrorCode.CONFLICT, message)
    if upload["state"] == UploadState.REFUSED:
        is_adapter = upload["kind"] == Kind.ADAPTER
        code = ErrorCode.ADAPTER_INVALID if is_adapter else ErrorCode.INVALID_REQUEST
        raise BadRequestError(code, "\n".join(upload["reasons"]))
    return upload


def _ended(upload: Values) -> web.Response:
    """Return the answer about an upload that has ended or is unfinished after the wait."""
    status = 200 if upload["state"] == UploadState.READY else 202
    return web.json_response(show_upload(upload) | {"missing": []}, status=status)


def shown_upload(*more: str, **types: Values) -> Values:
    """Return the JSON schema of the result of `show_upload`, with additional fields."""
    known = columns(artifact_uploads, is_null_shown=False)
    return describe.shown((*SHOWN, *more), types=known | types)


def show_upload(upload: Values) -> Values:
    """Return the JSON of an upload."""
    made = {name: upload[name] for name in SHOWN}
    tenant_id, created_at = upload["tenant_id"] or "", upload["created_at"].isoformat()
    return made | {"tenant_id": tenant_id, "created_at": created_at}
