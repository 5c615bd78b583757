"""Finds admin keys by the hash of their text."""

import hmac
import time

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.keys import is_expired
from control_plane.access.roles import Actor, Role
from control_plane.access.tables import admin_keys


async def find_actor(connection: AsyncConnection, secret_sha256: bytes) -> Actor | None:
    """Return whose key has this hash; None when there is none, or it is disabled or expired."""
    t = admin_keys.c
    query = select(t.id, t.role, t.tenant_id, t.secret_sha256, t.expires_at_unix_ms, t.is_disabled)
    row = (await connection.execute(query.where(t.secret_sha256 == secret_sha256))).first()
    if row is None or not hmac.compare_digest(row.secret_sha256, secret_sha256):
        return None
    if row.is_disabled or is_expired(row.expires_at_unix_ms, time.time_ns() // 1_000_000):
        return None
    return Actor(row.id, Role(row.role), row.tenant_id or "")
