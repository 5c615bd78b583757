"""REST of rules on texts. Only roles that may change rules may read rules."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.guard.model import BODY_BYTES_MAX, GuardSetBody, staged
from control_plane.http.resources import Resource
from control_plane.tables import guard_sets


async def _stage(connection: AsyncConnection, key: str, values: dict[str, Any]) -> None:
    query = select(guard_sets).where(guard_sets.c.id == key)
    row = (await connection.execute(query)).mappings().first()
    known = None if row is None else {str(name): value for name, value in row.items()}
    values.update(staged(known, values))


GUARD_SETS = Resource(
    path="guard-sets",
    table=guard_sets,
    shown=("id", *GuardSetBody.model_fields, "version"),
    read=Action.READ_TEXT_POLICIES,
    write=Action.WRITE_TENANTS,
    owner=guard_sets.c.owner_tenant_id,
    body=GuardSetBody,
    before_write=_stage,
    filters=("owner_tenant_id",),
    hidden=("rules",),
    body_bytes_max=BODY_BYTES_MAX,
)
