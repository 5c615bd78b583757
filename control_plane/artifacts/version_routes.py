"""REST of versions, which publishes an artifact as a release of a model, and may import it first.

A promotion points the model at the release at once for all callers, or in stages by a rollout.
Running requests finish on the release with which they began.
"""

from typing import Annotated, Any, Literal, Self

from aiohttp import web
from pydantic import Field, model_validator
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert

from control_plane.access.roles import Action, Actor
from control_plane.artifacts import catalogue
from control_plane.artifacts.catalogue import visible_to
from control_plane.artifacts.model import Kind, UploadState
from control_plane.artifacts.ranks import check_rank, other_pools, rank_in_manifest
from control_plane.artifacts.service import Artifacts
from control_plane.artifacts.tables import artifacts
from control_plane.artifacts.upload_routes import UploadRoutes, show_upload, shown_upload
from control_plane.artifacts.uploads import NewUpload
from control_plane.database import Database
from control_plane.fields import AdminBody, OptionalId, checked_digest
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.resources import first, lock_id
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import RECORDED, Write, WriteReply, Writes
from control_plane.models.model import release_id
from control_plane.models.routes import MODELS, check_model
from control_plane.rollouts.beginning import begin
from control_plane.rollouts.plan import Plan
from control_plane.tables import models, pools, releases
from sluice.errors import BadRequestError, ErrorCode, PlatformError

Values = dict[str, Any]
_KIND = "versions"
_DIGEST = "sha256:"
_FIELDS = ("base_digest", "pool_id", "adapter_digest", "release", "owner_tenant_id")
_STAGED = "staged"
SHOWN = (
    *("id", "model_id", "version", "adapter_digest", "base_digest", "is_promoted"),
    "rollout_id",
)


class VersionBody(AdminBody):
    """An adapter, or a base, that becomes a version of a model.

    For an adapter, `adapter_type` is `lora`. `artifact_uri` is `sha256:` with the digest of an
    artifact, or the source of an import. The source is a directory, or a `.safetensors` file in a
    directory. `base_model` is a model without an adapter, whose base and pool serve the new
    version.

    For a base alone, `adapter_type` is `none`, and `pool_id` is the pool that serves the version.

    Without `promote_to` the version is reachable as `model@version`, and the model is unchanged.
    `100%`, `production` and `stable` promote the version at once. `staged` begins a rollout with
    `plan`, or with the model's stored plan, and the answer has the rollout's id.
    """

    artifact_uri: Annotated[str, Field(max_length=2048)] = ""
    base_model: OptionalId = ""
    pool_id: OptionalId = ""
    adapter_type: Literal["lora", "none"] = "lora"
    promote_to: Literal["", "100%", "production", "stable", "staged"] = ""
    plan: Plan | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.adapter_type == "none":
            if not self.pool_id or self.artifact_uri or self.base_model:
                raise ValueError("a base alone needs pool_id, and no artifact_uri or base_model")
        elif not (self.artifact_uri and self.base_model) or self.pool_id:
            raise ValueError("an adapter needs artifact_uri and base_model, and no pool_id")
        if self.plan is not None and self.promote_to != _STAGED:
            raise ValueError("a plan is of a rollout: give promote_to staged, or no plan")
        return self


class VersionRoutes:
    """The request handlers of versions.

    Their routes precede the routes of models, because names of models may contain slashes.
    """

    def __init__(self, database: Database, service: Artifacts, uploads: UploadRoutes) -> None:
        self._database = database
        self._service = service
        self._uploads = uploads
        self._writes = Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        put = describe.operation(
            "Publish a version of a model (201 new, 200 again, 202 still importing)",
            answer=describe.shown(SHOWN, types={"is_promoted": describe.BOOLEAN}),
            body=VersionBody,
            also=(201,),
        )
        importing = {"application/json": {"schema": shown_upload()}}
        put["responses"]["202"] = {"description": "still importing", "content": importing}
        path = "/v1/models/{model_id:.+}/versions/{version}"
        return [AdminRoute("PUT", path, self.put, Action.WRITE_MODELS, _KIND, put)]

    async def put(self, request: web.Request) -> web.Response:
        """Create a version of a model, and promote the version if requested."""
        model_id, version = path_id(request, "model_id"), path_id(request, "version")
        # copied before the body is read, because a request cannot be cloned later
        plain = _without_key(request)
        body = await read_body(request, VersionBody)
        tenant_id = request[ACTOR].tenant_id or None
        if body.pool_id:
            base_digest = await self._base_of_pool(body.pool_id)
            values = _values(base_digest, body.pool_id, "", version)
            return await self._writes.run(
                request, lambda write: _publish(write, model_id, values, body)
            )
        base = await self._base(body.base_model, tenant_id)
        if body.artifact_uri.startswith(_DIGEST):
            digest = _digest(body.artifact_uri)
        else:
            source, base_digest = body.artifact_uri, base["base_digest"]
            new = NewUpload(tenant_id, Kind.ADAPTER, base_digest, source, {})
            upload = await self._uploads.bring(plain, new)
            request[RECORDED] = True
            if upload["state"] != UploadState.READY:
                return web.json_response(show_upload(upload), status=202)
            digest = upload["digest"]

        rank = await self._rank(request[ACTOR], digest)

        async def work(write: Write) -> WriteReply:
            shared = await other_pools(write.connection, model_id)
            for pool_id in (base["pool_id"], *shared):
                await check_rank(write.connection, pool_id, rank)
            values = _values(base["base_digest"], base["pool_id"], digest, version)
            return await _publish(write, model_id, values, body)

        return await self._writes.run(request, work)

    async def _rank(self, actor: Actor, digest: str) -> int:
        """Return the largest rank of an adapter, or 0 if the caller may see no such adapter."""
        query = visible_to(actor).with_only_columns(artifacts.c.manifest)
        query = query.where(artifacts.c.digest == digest, artifacts.c.kind == Kind.ADAPTER)
        document = await self._database.run(lambda connection: connection.scalar(query))
        return await rank_in_manifest(document, self._service.read_chunk)

    async def _base(self, model_id: str, tenant_id: str | None) -> Values:
        """Return base and pool of a model that a tenant may use.

        Raises:
            BadRequestError: There is no such model.
        """
        query = select(models).where(models.c.id == model_id, models.c.adapter_digest == "")
        found = await self._database.run(lambda connection: first(connection, query))
        is_seen = found is not None and found["owner_tenant_id"] in {None, tenant_id}
        if found is None or (tenant_id is not None and not is_seen):
            message = f"base_model: {model_id} is no model without an adapter: name such a one"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="base_model")
        return found

    async def _base_of_pool(self, pool_id: str) -> str:
        query = select(pools.c.base_digest).where(pools.c.id == pool_id)
        found = await self._database.run(lambda connection: connection.scalar(query))
        if found is None:
            message = f"pool_id: there is no pool {pool_id}: create it first"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="pool_id")
        return found


def _values(base_digest: str, pool_id: str, adapter_digest: str, version: str) -> Values:
    """Return the fields of a release."""
    return {
        "base_digest": base_digest,
        "pool_id": pool_id,
        "adapter_digest": adapter_digest,
        "release": version,
    }


def _without_key(request: web.Request) -> web.Request:
    """Return the request for an import, without the version's own idempotency key."""
    headers = request.headers.copy()
    headers.popall("Idempotency-Key", None)
    return request.clone(headers=headers)


async def _publish(write: Write, model_id: str, values: Values, body: VersionBody) -> WriteReply:
    """Create a release of a model, and the model if it does not exist."""
    connection, tenant_id = write.connection, write.actor.tenant_id
    is_promoted = body.promote_to not in {"", _STAGED}
    await connection.execute(lock_id(MODELS.path, model_id))
    query = select(models).where(models.c.id == model_id).with_for_update(key_share=True)
    before = await first(connection, query)
    owner = before["owner_tenant_id"] if before is not None else tenant_id or None
    values = values | {"owner_tenant_id": owner}
    write.require(owner)
    if before is None and tenant_id and not model_id.startswith(f"{tenant_id}/"):
        message = f"model_id: new names of a publisher of {tenant_id} begin with {tenant_id}/"
        raise PlatformError(ErrorCode.PERMISSION_DENIED, message, param="model_id")
    if before is None and not is_promoted:
        message = "promote_to: a new model needs a release; promote its first one"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="promote_to")
    if values["adapter_digest"]:
        await _check_artifact(write, owner, values)
    name = release_id(model_id, values["release"])
    known = await connection.scalar(select(releases.c.id).where(releases.c.id == name))
    check = MODELS.before_write if is_promoted else check_model
    await check(connection, model_id, values)
    if is_promoted:
        row = {"id": model_id} | MODELS.on_create() | values
        made = insert(models).values(row)
        await connection.execute(made.on_conflict_do_update(index_elements=["id"], set_=values))
    await MODELS.after_write(connection, model_id, values)
    rollout_id = ""
    if body.promote_to == _STAGED:
        rollout_id = (await begin(write, model_id, values["release"], body.plan)).id
    after = {
        "id": name,
        "model_id": model_id,
        "version": values["release"],
        "adapter_digest": values["adapter_digest"],
        "base_digest": values["base_digest"],
        "is_promoted": is_promoted,
        "rollout_id": rollout_id,
    }
    stood_for = None if before is None else {field: before[field] for field in _FIELDS}
    write.record("promote" if is_promoted else "publish", name, stood_for, after, owners=[owner])
    return WriteReply(after, name, 200 if known else 201)


async def _check_artifact(write: Write, owner: str | None, values: Values) -> None:
    """Refuse an artifact that the owner may not see, or that was not accepted for the base."""
    digest, base_digest = values["adapter_digest"], values["base_digest"]
    found = await catalogue.find(write.connection, owner, digest)
    if found is None or found["kind"] != Kind.ADAPTER:
        message = f"artifact_uri: there is no adapter {digest}: upload or import it first"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="artifact_uri")
    if base_digest not in found["base_digests"]:
        message = (
            f"artifact_uri: {digest} was not uploaded for base {base_digest}: upload it again for"
            " this one, so that it is checked"
        )
        raise BadRequestError(ErrorCode.ADAPTER_INVALID, message, param="artifact_uri")


def _digest(uri: str) -> str:
    try:
        return checked_digest(uri.removeprefix(_DIGEST))
    except ValueError as error:
        message = f"artifact_uri: {error}"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="artifact_uri") from None
