"""REST of tiers, tenants and keys."""

import secrets

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.http.keys import KeyRoutes
from control_plane.http.resources import Resource, ResourceRoutes, Values
from control_plane.http.routes import AdminRoute
from control_plane.models.names import take_space, unknown_names
from control_plane.tables import models, tenants, tiers
from control_plane.tenants.keys import KEYS
from control_plane.tenants.model import (
    ANY_MODEL,
    RESERVED,
    RESERVED_PERMILLE_MAX,
    SALT_BYTES,
    TenantBody,
    TierBody,
)
from sluice.errors import BadRequestError, ErrorCode, PlatformError

# advisory lock, held while the reserved shares of all tiers are added up
_RESERVES_LOCK = 7310520304


async def _check_tier(connection: AsyncConnection, key: str, values: Values) -> None:
    await _check_reserves(connection, key, values["reserved_permille"])
    await _check_limited(connection, set(values["model_limits"]))


async def _check_reserves(connection: AsyncConnection, key: str, wanted: int) -> None:
    """Refuse a reserved share that exceeds the share left by the other tiers."""
    if not wanted:
        return
    await connection.execute(select(func.pg_advisory_xact_lock(_RESERVES_LOCK)))
    query = select(func.coalesce(func.sum(tiers.c.reserved_permille), 0)).where(tiers.c.id != key)
    others = int(await connection.scalar(query) or 0)
    if others + wanted > RESERVED_PERMILLE_MAX:
        message = (
            f"{RESERVED.shown}: the other tiers have {RESERVED.show(others):g} of 100, so tier"
            f" {key} can have {RESERVED.show(RESERVED_PERMILLE_MAX - others):g}, not"
            f" {RESERVED.show(wanted):g}; lower theirs first"
        )
        raise PlatformError(ErrorCode.CONFLICT, message, param=RESERVED.shown)


async def _check_limited(connection: AsyncConnection, wanted: set[str]) -> None:
    """Refuse limits for an unknown model, because they would have no effect."""
    if not wanted:
        return
    query = select(models.c.id).where(models.c.id.in_(wanted))
    if missing := sorted(wanted - set((await connection.scalars(query)).all())):
        message = (
            f"model_limits: there is no model {missing[0]}; limits go by a model's own name, not by"
            " an alias or release"
        )
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="model_limits")


async def _check_tenant(connection: AsyncConnection, key: str, values: Values) -> None:
    """Refuse an id that is a prefix of other owners' names, and unknown fallbacks and pins."""
    await take_space(connection, key)
    fallbacks: dict[str, str] = values["fallbacks"]
    for model, instead in fallbacks.items():
        if model == instead:
            message = f"fallbacks: {model} cannot stand in for itself"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="fallbacks")
    named = {*fallbacks, *fallbacks.values()} - {ANY_MODEL}
    if missing := await unknown_names(connection, named, key):
        message = (
            f"fallbacks: there is no model, release or alias {missing[0]} that tenant {key} may use"
        )
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="fallbacks")
    pins: dict[str, str] = values["pins"]
    pinned = {f"{model}@{release}" for model, release in pins.items()}
    if pinned and (missing := await unknown_names(connection, pinned, key)):
        message = f"pins: there is no release {missing[0]} that tenant {key} may use"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="pins")


TIERS = Resource(
    path="tiers",
    table=tiers,
    shown=("id", *TierBody.model_fields),
    read=Action.READ_PLATFORM,
    write=Action.WRITE_TENANTS,
    body=TierBody,
    shares=(RESERVED,),
    before_write=_check_tier,
)
TENANTS = Resource(
    path="tenants",
    table=tenants,
    shown=("id", *TenantBody.model_fields),
    read=Action.READ_TENANT,
    write=Action.WRITE_TENANTS,
    owner=tenants.c.id,
    body=TenantBody,
    on_create=lambda: {"cache_salt": secrets.token_bytes(SALT_BYTES)},
    before_write=_check_tenant,
)
RESOURCES = (TIERS, TENANTS)


def routes(database: Database) -> list[AdminRoute]:
    """Return the routes."""
    return [
        *KeyRoutes(database, KEYS).routes(),
        *(route for kind in RESOURCES for route in ResourceRoutes(database, kind).routes()),
    ]
