"""Creates, reads and ends sessions of the console, in the caller's transaction."""

from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.repository import find_actor
from control_plane.access.roles import Actor, Role
from control_plane.access.sessions import SESSIONS_MAX, ConsoleSession
from control_plane.access.tables import console_sessions
from control_plane.tables import tenants

_T = console_sessions.c
OfBootstrap = Callable[[bytes], Actor | None]


async def begin(
    connection: AsyncConnection,
    session_id: str,
    actor: Actor,
    hashes: tuple[bytes, bytes | None],
    life_s: float,
) -> ConsoleSession:
    """Store a session, and end the actor's oldest sessions above the limit.

    Args:
        connection: Connection of the caller's transaction.
        session_id: Id of the new session.
        actor: Actor of the session's requests.
        hashes: Hash of the session's cookie, and hash of the admin key. The second hash is None if
            a person signed in.
        life_s: Seconds until the session ends, by the database's clock.
    """
    secret_sha256, key_sha256 = hashes
    is_person = key_sha256 is None
    values = {
        "id": session_id,
        "secret_sha256": secret_sha256,
        "key_sha256": key_sha256,
        "actor_id": actor.id,
        "role": str(actor.role) if is_person else None,
        "tenant_id": (actor.tenant_id or None) if is_person else None,
        "name": actor.name,
        "expires_at": func.now() + timedelta(seconds=life_s),
    }
    query = insert(console_sessions).values(values).returning(_T.expires_at)
    expires_at = (await connection.execute(query)).scalar_one()
    latest = select(_T.id).where(_T.actor_id == actor.id).order_by(_T.id.desc()).limit(SESSIONS_MAX)
    is_too_many = (_T.actor_id == actor.id) & _T.id.not_in(latest)
    await connection.execute(delete(console_sessions).where(is_too_many))
    return ConsoleSession(session_id, actor, expires_at)


async def find(
    connection: AsyncConnection, secret_sha256: bytes, of_bootstrap: OfBootstrap
) -> ConsoleSession | None:
    """Return the session of a cookie, or None if there is no valid session.

    Args:
        connection: Connection to read with.
        secret_sha256: Hash of the cookie.
        of_bootstrap: Returns the actor for the hash of the settings' bootstrap key, or None for
            other hashes.
    """
    is_it = (_T.secret_sha256 == secret_sha256, _T.expires_at > func.now())
    row = (await connection.execute(select(console_sessions).where(*is_it))).first()
    if row is None:
        return None
    if row.key_sha256 is None:
        query = select(tenants.c.is_disabled).where(tenants.c.id == row.tenant_id)
        if row.tenant_id is not None and await connection.scalar(query) is not False:
            return None
        actor = Actor(row.actor_id, Role(row.role), row.tenant_id or "", row.name)
        return ConsoleSession(row.id, actor, row.expires_at)
    actor = of_bootstrap(row.key_sha256) or await find_actor(connection, row.key_sha256)
    if actor is None:
        return None
    named = Actor(actor.id, actor.role, actor.tenant_id, row.name or actor.name)
    return ConsoleSession(row.id, named, row.expires_at)


async def end(connection: AsyncConnection, secret_sha256: bytes) -> None:
    """End the session of a cookie, if it exists."""
    is_it = _T.secret_sha256 == secret_sha256
    await connection.execute(delete(console_sessions).where(is_it))


async def end_all(connection: AsyncConnection, actor_id: str) -> None:
    """End all sessions of an actor."""
    await connection.execute(delete(console_sessions).where(_T.actor_id == actor_id))


async def prune(connection: AsyncConnection) -> None:
    """Delete the sessions that have ended."""
    await connection.execute(delete(console_sessions).where(_T.expires_at < func.now()))
