"""REST of artifacts and their chunks. The REST of uploads is `upload_routes`."""

from typing import Any

from aiohttp import web

from control_plane.access.roles import Action
from control_plane.artifacts import catalogue
from control_plane.artifacts.bodies import MANIFEST, ArtifactPinBody
from control_plane.artifacts.garbage_routes import GarbageRoutes
from control_plane.artifacts.service import Artifacts
from control_plane.artifacts.signing_keys import SIGNING_KEYS
from control_plane.artifacts.tables import artifacts
from control_plane.artifacts.upload_routes import UploadRoutes
from control_plane.artifacts.version_routes import VersionRoutes
from control_plane.database import Database
from control_plane.fields import checked_digest
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.columns import columns
from control_plane.http.resources import ResourceRoutes, fetch, page, shown
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from sluice.errors import ErrorCode, PlatformError

Values = dict[str, Any]
_KIND = "artifacts"


class ArtifactRoutes:
    """The request handlers of artifacts."""

    def __init__(self, database: Database, service: Artifacts) -> None:
        self._database = database
        self._service = service
        self._writes = Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the routes of artifacts, uploads, versions, signing keys and garbage."""
        row = describe.shown(catalogue.SHOWN, types=columns(artifacts))
        read, one = Action.READ_TENANT, "/v1/artifacts/{digest}"
        listing = describe.listing("List artifacts", row, ("kind",))
        show = describe.operation("Show an artifact", answer=row)
        write = Action.WRITE_ARTIFACTS
        remove = describe.operation(
            "Take an artifact from a tenant; its bytes go when no object needs them",
            query=("tenant_id",),
        )
        pin = describe.operation(
            "Keep an artifact, needed or not", answer=row, body=ArtifactPinBody
        )
        manifest = describe.operation("Show an artifact's manifest", answer=MANIFEST)
        chunk = describe.operation("Read a chunk of an artifact", answer={"type": "string"})
        uploads = UploadRoutes(self._database, self._service)
        return [
            *uploads.routes(),
            *VersionRoutes(self._database, self._service, uploads).routes(),
            *ResourceRoutes(self._database, SIGNING_KEYS).routes(),
            *GarbageRoutes(self._database, self._service).routes(),
            AdminRoute("GET", "/v1/artifacts", self.list, read, _KIND, listing),
            AdminRoute("GET", one, self.get, read, _KIND, show),
            AdminRoute("DELETE", one, self.delete, write, _KIND, remove),
            AdminRoute("PUT", f"{one}/pin", self.pin, write, _KIND, pin),
            AdminRoute("GET", f"{one}/manifest", self.manifest, read, _KIND, manifest),
            AdminRoute("GET", "/v1/artifacts/chunks/{chunk}", self.chunk, read, _KIND, chunk),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of artifacts."""
        query = catalogue.visible_to(request[ACTOR])
        if (kind := request.query.get("kind")) is not None:
            query = query.where(artifacts.c.kind == kind.replace("\0", ""))
        return await page(self._database, query, artifacts.c.digest, request, _show)

    async def get(self, request: web.Request) -> web.Response:
        """Return one artifact."""
        digest = path_id(request, "digest", checked_digest)
        query = catalogue.visible_to(request[ACTOR]).where(artifacts.c.digest == digest)
        rows = await fetch(self._database, query)
        if not rows:
            raise _no_artifact(digest)
        return shown(request, _show(rows[0]))

    async def delete(self, request: web.Request) -> web.Response:
        """Remove an artifact from a tenant (204), or refuse with 409 while a model refers to it."""
        digest = path_id(request, "digest", checked_digest)
        tenant_id = request.query.get("tenant_id") or request[ACTOR].tenant_id or None

        async def work(write: Write) -> WriteReply:
            found = await catalogue.locked(write.connection, write.actor, digest)
            if found is None:
                raise _no_artifact(digest)
            write.record("withdraw", digest, _show(found), None, owners=[tenant_id])
            if await catalogue.is_named(write.connection, digest):
                message = f"models, releases or bases name {digest}: delete them first"
                raise PlatformError(ErrorCode.CONFLICT, message)
            if not await catalogue.withdraw(write.connection, digest, tenant_id):
                raise _no_artifact(digest)
            return WriteReply(None, digest, 204)

        return await self._writes.run(request, work)

    async def pin(self, request: web.Request) -> web.Response:
        """Set whether an artifact is kept without references."""
        digest = path_id(request, "digest", checked_digest)
        is_pinned = (await read_body(request, ArtifactPinBody)).is_pinned

        async def work(write: Write) -> WriteReply:
            found = await catalogue.locked(write.connection, write.actor, digest)
            if found is None:
                raise _no_artifact(digest)
            before = _show(found)
            after = before | {"is_pinned": is_pinned}
            # A pinned artifact uses disk space of all tenants, so a tenant may not pin an artifact.
            write.record("pin", digest, before, after, owners=[None])
            await catalogue.pin(write.connection, digest, is_pinned=is_pinned)
            return WriteReply(after, digest)

        return await self._writes.run(request, work)

    async def manifest(self, request: web.Request) -> web.Response:
        """Return the manifest of one artifact."""
        digest = path_id(request, "digest", checked_digest)
        actor = request[ACTOR]
        found = await self._database.run(
            lambda connection: catalogue.manifest_of(connection, actor, digest)
        )
        if found is None:
            raise _no_artifact(digest)
        return shown(request, found)

    async def chunk(self, request: web.Request) -> web.Response:
        """Return the bytes of a chunk, after a check of their hash."""
        sha256 = path_id(request, "chunk", checked_digest)
        actor = request[ACTOR]
        size = await self._database.run(
            lambda connection: catalogue.chunk_size(connection, actor, sha256)
        )
        if size is None:
            raise PlatformError(ErrorCode.NOT_FOUND, f"there is no chunk {sha256}")
        content = await self._service.store.get(sha256)
        # The content of a hash never changes, so it can be cached forever.
        headers = {"ETag": f'"{sha256}"', "Cache-Control": "private, immutable, max-age=31536000"}
        return web.Response(body=content, headers=headers)


def _no_artifact(digest: str) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no artifact {digest}")


def _show(row: Values) -> Values:
    return row | {"created_at": row["created_at"].isoformat()}
