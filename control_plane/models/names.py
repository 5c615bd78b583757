"""Reserves public names, because models and aliases share one namespace.

The name of a release begins with the name of its model. A name that begins with a tenant's id and a
slash belongs to this tenant.
"""

from collections.abc import Iterable

from sqlalchemy import ColumnElement, Table, func, or_, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.models.model import RELEASE_MARK
from control_plane.tables import aliases, models, releases, tenants
from sluice.errors import BadRequestError, ErrorCode, PlatformError

# Advisory lock per name, held while the name is reserved, because no constraint covers several
# tables.
_LOCKS = 731052


async def take_name(
    connection: AsyncConnection, name: str, owner_tenant_id: str | None, *, others: Table
) -> None:
    """Reserve a name for a model or an alias until the transaction ends.

    Args:
        connection: Connection of the transaction that writes the name.
        name: Public name.
        owner_tenant_id: Tenant of the name, or None if all tenants may use the name.
        others: Table that must not contain the name.

    Raises:
        PlatformError: The name contains an `@`, belongs to another tenant, or is in `others`.
    """
    if RELEASE_MARK in name:
        message = (
            f"id: {RELEASE_MARK} stands between a model and its release: leave it out of names"
        )
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="id")
    await _lock(connection, name)
    if await connection.scalar(select(others.c.id).where(others.c.id == name)):
        message = f"{name} is one of {others.name} already: choose another name"
        raise PlatformError(ErrorCode.CONFLICT, message, param="id")
    space, slash, _ = name.partition("/")
    if not slash or owner_tenant_id == space:
        return
    await _lock(connection, space)
    if await connection.scalar(select(tenants.c.id).where(tenants.c.id == space)):
        message = (
            f"owner_tenant_id: names that begin with {space}/ are of tenant {space}; make it the "
            "owner, or choose another name"
        )
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="owner_tenant_id")


async def take_space(connection: AsyncConnection, tenant_id: str) -> None:
    """Check that no other owner has names with the id of a new tenant as their prefix.

    Raises:
        PlatformError: The id contains a slash or an `@` (400), or another owner has such a name
            (409).
    """
    if await connection.scalar(select(tenants.c.id).where(tenants.c.id == tenant_id)):
        return
    if "/" in tenant_id or RELEASE_MARK in tenant_id:
        message = (
            f"id: names of a tenant begin with its id and a /, so it has no / and no {RELEASE_MARK}"
        )
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="id")
    await _lock(connection, tenant_id)
    for table in (models, aliases):
        is_below = table.c.id.startswith(f"{tenant_id}/", autoescape=True)
        if found := await connection.scalar(select(table.c.id).where(is_below).limit(1)):
            message = (
                f"{found} of {table.name} begins like the names of this tenant, but is not its "
                "own: choose another id, or delete it first"
            )
            raise PlatformError(ErrorCode.CONFLICT, message, param="id")


async def unknown_names(
    connection: AsyncConnection, names: Iterable[str], tenant_id: str
) -> list[str]:
    """Return the names for which a tenant may use no model, release or alias."""
    wanted = set(names)

    def is_visible(table: Table) -> ColumnElement[bool]:
        return or_(table.c.owner_tenant_id.is_(None), table.c.owner_tenant_id == tenant_id)

    found = union(
        select(models.c.id).where(models.c.id.in_(wanted), is_visible(models)),
        select(releases.c.id)
        .join(models, models.c.id == releases.c.model_id)
        .where(releases.c.id.in_(wanted), is_visible(models)),
        select(aliases.c.id)
        .join(models, models.c.id == aliases.c.model_id)
        .where(aliases.c.id.in_(wanted), is_visible(aliases), is_visible(models)),
    )
    return sorted(wanted - set((await connection.scalars(found)).all()))


async def _lock(connection: AsyncConnection, name: str) -> None:
    await connection.execute(select(func.pg_advisory_xact_lock(_LOCKS, func.hashtext(name))))
