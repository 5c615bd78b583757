"""REST of bases, models, their releases and aliases."""

import time
from dataclasses import replace

import structlog
from sqlalchemy import Boolean, ColumnElement, Text, and_, column, or_, select, table, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.fields import checked_digest, is_id
from control_plane.http.resources import (
    Hook,
    Resource,
    ResourceRoutes,
    Values,
    in_turn,
    no_check,
)
from control_plane.http.routes import AdminRoute
from control_plane.models.model import (
    RELEASE_MARK,
    AliasBody,
    BaseBody,
    ModelBody,
    release_id,
    release_of_digests,
)
from control_plane.models.names import take_name
from control_plane.models.pools import MODEL_POOLS
from control_plane.models.warm_prompts import WARM_PROMPTS
from control_plane.tables import aliases, bases, models, pools, releases, tenants
from sluice.errors import BadRequestError, ErrorCode, PlatformError

log = structlog.get_logger(__name__)

# Columns of a table of the rollouts domain, which imports this module. They are named here to avoid
# an import cycle.
_rollouts = table(
    "rollouts",
    *(column(name, Text) for name in ("id", "model_id", "control", "canary")),
    column("is_live", Boolean),
)


async def check_model(connection: AsyncConnection, key: str, values: Values) -> None:
    """Refuse a used name and a pool of another base, and set the name of the release.

    A missing pool is detected by the database.
    """
    await take_name(connection, key, values["owner_tenant_id"], others=aliases)
    query = select(pools.c.base_digest).where(pools.c.id == values["pool_id"]).with_for_update()
    served = await connection.scalar(query)
    if served not in {None, values["base_digest"]}:
        message = f"pool_id: pool {values['pool_id']} serves base {served}, not the model's"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="pool_id")
    if not values["release"]:
        values["release"] = release_of_digests(values["base_digest"], values["adapter_digest"])
    if not is_id(release_id(key, values["release"])):
        message = "release: the names of model and release are too long together; shorten one"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="release")


async def _check_replaced_model(connection: AsyncConnection, key: str, values: Values) -> None:
    """Refuse in the same cases as `check_model`, and during a rollout of the model."""
    await _check_is_steady(connection, key)
    await check_model(connection, key, values)
    query = select(models.c.release, models.c.previous_release).where(models.c.id == key)
    known = (await connection.execute(query)).first()
    if known is None:
        values["previous_release"] = ""
    else:
        is_same = known.release == values["release"]
        values["previous_release"] = known.previous_release if is_same else known.release


async def _check_is_steady(connection: AsyncConnection, key: str) -> None:
    """Refuse to change a model until its rollout is settled, shortly after the end of its split."""
    t = _rollouts.c
    if rollout := await connection.scalar(select(t.id).where(t.is_live, t.model_id == key)):
        message = (
            f"model {key} is in rollout ({rollout}): wait for its end, or abort it, before the "
            "model is changed"
        )
        raise PlatformError(ErrorCode.CONFLICT, message)


async def _remove_model(connection: AsyncConnection, key: str) -> None:
    """Refuse to delete a model during its rollout. Otherwise delete the pins to the model."""
    await _check_is_steady(connection, key)
    await _unpin(connection, key)


async def _unpin(connection: AsyncConnection, model_id: str, release: str = "") -> None:
    """Remove the pins to a model, or only to one of its releases."""
    pins = tenants.c.pins
    is_pinned = pins[model_id].astext == release if release else pins.has_key(model_id)
    query = update(tenants).where(is_pinned).values(pins=pins - model_id).returning(tenants.c.id)
    for tenant_id in sorted((await connection.scalars(query)).all()):
        log.info("pin_removed", tenant=tenant_id, model=model_id, release=release)


async def _record_release(connection: AsyncConnection, key: str, values: Values) -> None:
    """Store a release. If the model points at it, move the model's releases of the same base along.

    They move to the pool of the stored release. During a rollout each release stays in its pool,
    because the fleet needs both pools until the end of the rollout.
    """
    name = release_id(key, values["release"])
    parts = {part: values[part] for part in ("base_digest", "adapter_digest", "pool_id")}
    made = insert(releases).values(id=name, model_id=key, **parts).on_conflict_do_nothing()
    await connection.execute(made)
    query = select(releases).where(releases.c.id == name)
    kept = (await connection.execute(query)).mappings().one()
    if any(kept[part] != parts[part] for part in ("base_digest", "adapter_digest")):
        message = f"release: {name} has other digests, and a release never changes: name a new one"
        raise PlatformError(ErrorCode.CONFLICT, message, param="release")
    moved = await _moved_along(connection, key, values)
    is_elsewhere = releases.c.pool_id.is_distinct_from(values["pool_id"])
    query = update(releases).where(moved, is_elsewhere)
    await connection.execute(query.values(pool_id=values["pool_id"]))


async def _moved_along(
    connection: AsyncConnection, key: str, values: Values
) -> ColumnElement[bool]:
    """Return the condition for the releases that move to the pool of the written release."""
    name = release_id(key, values["release"])
    query = select(models.c.release, models.c.pool_id).where(models.c.id == key)
    release, pool_id = (await connection.execute(query)).one()
    query = select(_rollouts.c.control, _rollouts.c.canary)
    query = query.where(_rollouts.c.model_id == key, _rollouts.c.is_live)
    live = (await connection.execute(query)).first()
    if live is None and (release, pool_id) == (values["release"], values["pool_id"]):
        is_of_base = releases.c.base_digest == values["base_digest"]
        return and_(releases.c.model_id == key, is_of_base)
    stands = release_id(key, release)
    in_use = {stands} if pool_id != values["pool_id"] else set[str]()
    in_use |= {release_id(key, arm) for arm in live or ()}
    return and_(releases.c.id == name, releases.c.id.not_in(sorted(in_use)))


async def _check_alias(connection: AsyncConnection, key: str, values: Values) -> None:
    """Refuse a used name and a missing target, and set the row's reference columns."""
    await take_name(connection, key, values["owner_tenant_id"], others=models)
    target = values["target"]
    release = and_(releases.c.model_id == models.c.id, releases.c.id == target)
    query = (
        select(models.c.id, models.c.owner_tenant_id, releases.c.id.label("release_id"))
        .outerjoin(releases, release)
        .where(or_(models.c.id == target, releases.c.id == target))
    )
    found = (await connection.execute(query)).first()
    wanted = values["owner_tenant_id"]
    is_anothers = found is not None and found.owner_tenant_id not in {None, wanted}
    # the caller may be a publisher, to whom objects of other tenants must not be revealed
    if found is None or (is_anothers and wanted is not None):
        whose = f" that tenant {wanted} may use" if wanted else ""
        message = (
            f"target: {target} is no model or release{whose} (an alias cannot name another alias)"
        )
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="target")
    if is_anothers:
        owner = found.owner_tenant_id
        message = f"owner_tenant_id: {target} is of tenant {owner}, so its aliases must be too"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="owner_tenant_id")
    values |= {"model_id": found.id, "release_id": found.release_id}


async def _remove_release(connection: AsyncConnection, key: str) -> None:
    """Refuse to delete a release that its model or a rollout uses.

    Otherwise delete the pins to the release.
    """
    await _check_release_is_past(connection, key)
    await _unpin(connection, *key.rsplit(RELEASE_MARK, 1))


async def _check_release_is_past(connection: AsyncConnection, key: str) -> None:
    """Refuse to delete the release that its model points at now."""
    query = (
        select(models.c.id, models.c.release)
        .join(releases, releases.c.model_id == models.c.id)
        .where(releases.c.id == key)
        .with_for_update(of=models, read=True)
    )
    model = (await connection.execute(query)).first()
    if model is not None and release_id(model.id, model.release) == key:
        message = f"model {model.id} serves this release: promote another one first"
        raise PlatformError(ErrorCode.CONFLICT, message)
    t = _rollouts.c  # not the splits, because a rollout is live a little longer than its split
    either = (t.model_id + RELEASE_MARK + name == key for name in (t.control, t.canary))
    if rollout := await connection.scalar(select(t.id).where(t.is_live, or_(*either))):
        message = f"{rollout} needs this release until it is over: wait for its end, or abort it"
        raise PlatformError(ErrorCode.CONFLICT, message)


_RELEASE_OWNER = (
    select(models.c.owner_tenant_id)
    .where(models.c.id == releases.c.model_id)
    .correlate(releases)
    .scalar_subquery()
)

BASES = Resource(
    path="bases",
    table=bases,
    shown=("digest", *BaseBody.model_fields),
    read=Action.READ_PUBLIC,
    write=Action.WRITE_MODELS,
    body=BaseBody,
    id_check=checked_digest,
)
MODELS = Resource(
    path="models",
    table=models,
    shown=("id", *ModelBody.model_fields, "previous_release", "created_at_unix_s"),
    read=Action.READ_TENANT,
    write=Action.WRITE_MODELS,
    owner=models.c.owner_tenant_id,
    body=ModelBody,
    on_create=lambda: {"created_at_unix_s": int(time.time())},
    before_write=_check_replaced_model,
    after_write=_record_release,
    before_delete=_remove_model,
    id_pattern=".+",
)
RELEASES = Resource(
    path="releases",
    table=releases,
    shown=("id", "model_id", "base_digest", "adapter_digest", "pool_id"),
    read=Action.READ_TENANT,
    write=Action.WRITE_MODELS,
    owner=_RELEASE_OWNER,
    is_removable=True,
    before_delete=_remove_release,
    filters=("model_id",),
    id_pattern=".+",
)
ALIASES = Resource(
    path="aliases",
    table=aliases,
    shown=("id", *AliasBody.model_fields),
    read=Action.READ_TENANT,
    write=Action.WRITE_MODELS,
    owner=aliases.c.owner_tenant_id,
    body=AliasBody,
    before_write=_check_alias,
    id_pattern=".+",
)
RESOURCES = (BASES, MODELS, RELEASES, ALIASES, WARM_PROMPTS, MODEL_POOLS)


def routes(
    database: Database, check_adapter: Hook = no_check, check_pools: Hook = no_check
) -> list[AdminRoute]:
    """Return the routes of models and related resources.

    Args:
        database: Database of models.
        check_adapter: Refuses an adapter that the pools of its model do not serve.
        check_pools: Refuses pools of a model that do not serve its adapter.
    """
    more = {MODELS.path: check_adapter, MODEL_POOLS.path: check_pools}
    checked = [
        replace(it, before_write=in_turn(it.before_write, more.get(it.path, no_check)))
        for it in RESOURCES
    ]
    return [route for kind in checked for route in ResourceRoutes(database, kind).routes()]
