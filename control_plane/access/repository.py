"""Finds admin keys by the hash of their text."""

import hmac
import time

from sqlalchemy import false, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.keys import is_expired
from control_plane.access.roles import Actor, Role
from control_plane.access.tables import admin_keys
from control_plane.tables import tenants


async def find_actor(connection: AsyncConnection, secret_sha256: bytes) -> Actor | None:
    """Return the actor of the key with this hash, or None if there is no valid key.

    A key is not valid if it is disabled or has expired, or if its tenant is disabled.
    """
    t = admin_keys.c
    is_disabled = or_(t.is_disabled, func.coalesce(tenants.c.is_disabled, false()))
    query = (
        select(
            *(t.id, t.role, t.tenant_id, t.name, t.secret_sha256, t.expires_at_unix_ms),
            is_disabled.label("is_disabled"),
        )
        .outerjoin(tenants, tenants.c.id == t.tenant_id)
        .where(t.secret_sha256 == secret_sha256)
    )
    row = (await connection.execute(query)).first()
    if row is None or not hmac.compare_digest(row.secret_sha256, secret_sha256):
        return None
    if row.is_disabled or is_expired(row.expires_at_unix_ms, time.time_ns() // 1_000_000):
        return None
    return Actor(row.id, Role(row.role), row.tenant_id or "", row.name)
