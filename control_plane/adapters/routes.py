"""REST of adapters across models, with their releases and the nodes that have them.

Adapters are artifacts that were uploaded as adapters, and artifacts that a release names as its
adapter. The second kind exists because an operator may have copied an artifact to nodes by hand.
"""

from typing import Any, cast

from aiohttp import web
from sqlalchemy import (
    Column,
    ColumnElement,
    Select,
    Text,
    any_,
    exists,
    func,
    literal,
    or_,
    select,
    union,
)
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by

from control_plane.access.roles import Action, Actor, Reach
from control_plane.artifacts.catalogue import visible_to
from control_plane.artifacts.model import Kind
from control_plane.artifacts.tables import artifact_grants, artifacts
from control_plane.database import Database
from control_plane.distribution.tables import node_artifacts
from control_plane.fields import checked_digest
from control_plane.http import describe
from control_plane.http.bodies import path_id
from control_plane.http.resources import fetch, page, shown
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.models.model import RELEASE_MARK
from control_plane.tables import models, releases
from sluice.errors import ErrorCode, PlatformError

Values = dict[str, Any]
_KIND = "adapters"
_TEXTS = ARRAY(Text)
_FILTERS = ("model_id", "base_digest", "tenant_id")
SHOWN = (
    *("digest", "base_digests", "size_bytes", "releases", "promoted", "tenant_ids"),
    *("is_public", "is_uploaded", "is_pinned", "node_count", "created_at"),
)
_TYPES = {
    **dict.fromkeys(("base_digests", "releases", "promoted", "tenant_ids"), describe.TEXTS),
    **dict.fromkeys(("is_public", "is_uploaded", "is_pinned"), describe.BOOLEAN),
    "size_bytes": describe.nullable(describe.INTEGER),
    "node_count": describe.INTEGER,
}
_HELD = ("id", "digest", "since")


class AdapterRoutes:
    """The request handlers of adapters and their nodes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        row, read = describe.shown(SHOWN, types=_TYPES), Action.READ_TENANT
        listing = describe.listing("List adapters across models", row, _FILTERS)
        show = describe.operation("Show an adapter", answer=row)
        nodes = describe.listing(
            "List the nodes that have a complete artifact on disk", describe.shown(_HELD)
        )
        path, platform = "/v1/artifacts/{digest}/nodes", Action.READ_PLATFORM
        return [
            AdminRoute("GET", "/v1/adapters", self.list, read, _KIND, listing),
            AdminRoute("GET", "/v1/adapters/{digest}", self.get, read, _KIND, show),
            AdminRoute("GET", path, self.nodes, platform, "artifacts", nodes),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of adapters."""
        wanted = {
            name: request.query[name].replace("\0", "")
            for name in _FILTERS
            if name in request.query
        }
        query, key = _adapters(request[ACTOR], wanted)
        return await page(self._database, query, key, request, _show)

    async def get(self, request: web.Request) -> web.Response:
        """Return one adapter."""
        digest = path_id(request, "digest", checked_digest)
        query, key = _adapters(request[ACTOR], {})
        rows = await fetch(self._database, query.where(key == digest))
        if not rows:
            message = f"there is no adapter {digest}: GET /v1/adapters lists them; or upload it"
            raise PlatformError(ErrorCode.NOT_FOUND, message)
        return shown(request, _show(rows[0]))

    async def nodes(self, request: web.Request) -> web.Response:
        """Return a page of the nodes that have an adapter. An unknown adapter has no nodes."""
        digest = path_id(request, "digest", checked_digest)
        t = node_artifacts.c
        columns: list[ColumnElement[Any]] = [t.node_id.label("id"), t.digest, t.since]
        query = select(*columns).where(t.digest == digest)
        key = cast("Column[str]", t.node_id)
        return await page(self._database, query, key, request, _show_held)


def _adapters(actor: Actor, wanted: dict[str, str]) -> tuple[Select[Any], Column[str]]:
    """Return the query of the adapters that an actor may see, with its sort key.

    Args:
        actor: The caller.
        wanted: Filters by model, base and tenant.
    """
    is_adapter = artifacts.c.kind == literal(str(Kind.ADAPTER))
    # an artifact without a grant is being removed
    is_given = exists().where(artifact_grants.c.digest == artifacts.c.digest)
    stored = visible_to(actor).where(is_adapter, is_given).subquery("stored")
    used = _used(actor).subquery("used")
    known = union(select(stored.c.digest), select(used.c.digest)).subquery("known")
    held = select(func.count()).where(node_artifacts.c.digest == known.c.digest)
    key = cast("Column[str]", known.c.digest)
    tenants = _granted(actor, key)
    query = (
        select(
            known.c.digest,
            *(stored.c[name] for name in ("base_digests", "size_bytes", "is_pinned", "created_at")),
            *(used.c[name] for name in ("releases", "promoted", "bases", "owners")),
            tenants.label("granted"),
            held.scalar_subquery().label("node_count"),
        )
        .outerjoin(stored, stored.c.digest == known.c.digest)
        .outerjoin(used, used.c.digest == known.c.digest)
    )
    if (model := wanted.get("model_id")) is not None:
        query = query.where(literal(model) == any_(used.c.models))
    if (base := wanted.get("base_digest")) is not None:
        fits = (literal(base) == any_(stored.c.base_digests), literal(base) == any_(used.c.bases))
        query = query.where(or_(*fits))
    if (tenant := wanted.get("tenant_id")) is not None:
        its = (literal(tenant) == any_(tenants), literal(tenant) == any_(used.c.owners))
        query = query.where(or_(*its))
    return query, key


def _used(actor: Actor) -> Select[Any]:
    """Return the query of the adapters that releases name, with the owners ('' for all tenants)."""
    t, model = releases.c, models.c
    stands = model.id + RELEASE_MARK + model.release == t.id
    columns: list[ColumnElement[Any]] = [
        t.adapter_digest.label("digest"),
        _all(aggregate_order_by(t.id, t.id)).label("releases"),
        _all(aggregate_order_by(model.id, model.id)).filter(stands).label("promoted"),
        _all(model.id.distinct()).label("models"),
        _all(t.base_digest.distinct()).label("bases"),
        _all(func.coalesce(model.owner_tenant_id, "").distinct()).label("owners"),
    ]
    query = select(*columns).join(models, model.id == t.model_id)
    query = query.where(t.adapter_digest != "").group_by(t.adapter_digest)
    if actor.reach(Action.READ_TENANT) is Reach.ALL:
        return query
    return query.where(_is_its(actor, model.owner_tenant_id))


def _all(values: ColumnElement[Any]) -> Any:
    return func.array_agg(values, type_=_TEXTS)


def _granted(actor: Actor, digest: Column[str]) -> ColumnElement[Any]:
    """Return the SQL array of tenants that may use an uploaded artifact ('' for all tenants)."""
    who = artifact_grants.c.tenant_id
    query = select(func.coalesce(who, "")).where(artifact_grants.c.digest == digest)
    if actor.reach(Action.READ_TENANT) is not Reach.ALL:
        query = query.where(_is_its(actor, who))
    return func.array(query.scalar_subquery(), type_=_TEXTS)


def _is_its(actor: Actor, owner: Column[Any]) -> ColumnElement[bool]:
    return or_(owner.is_(None), owner == actor.tenant_id)


def _show(row: Values) -> Values:
    """Return the JSON of an adapter. Without an upload, it belongs to the owners of its models."""
    is_uploaded = row["size_bytes"] is not None
    owners = row["granted"] if is_uploaded else row["owners"]
    created_at = row["created_at"]
    return {
        "digest": row["digest"],
        "base_digests": sorted({*(row["base_digests"] or ()), *(row["bases"] or ())}),
        "size_bytes": row["size_bytes"],
        "releases": row["releases"] or [],
        "promoted": row["promoted"] or [],
        "tenant_ids": sorted(owner for owner in owners if owner),
        "is_public": "" in owners,
        "is_uploaded": is_uploaded,
        "is_pinned": bool(row["is_pinned"]),
        "node_count": row["node_count"],
        "created_at": "" if created_at is None else created_at.isoformat(),
    }


def _show_held(row: Values) -> Values:
    return row | {"since": row["since"].isoformat()}
