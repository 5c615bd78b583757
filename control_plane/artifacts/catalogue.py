"""Reads and changes the accepted artifacts that a tenant may see, in the caller's transactions."""

from typing import Any

from sqlalchemy import Select, delete, exists, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action, Actor, Reach
from control_plane.artifacts.sweep import named
from control_plane.artifacts.tables import artifact_chunks, artifact_grants, artifacts, chunks
from control_plane.artifacts.uploads import granted

SHOWN = ("digest", "kind", "base_digests", "size_bytes", "file_count", "is_pinned", "created_at")


def visible_to(actor: Actor) -> Select[Any]:
    """Return the query of the artifacts that an actor may see, without the manifests."""
    query = select(*(artifacts.c[name] for name in SHOWN)).where(artifacts.c.retired_at.is_(None))
    if actor.reach(Action.READ_TENANT) is Reach.ALL:
        return query
    return query.where(granted(actor.tenant_id))


async def manifest_of(
    connection: AsyncConnection, actor: Actor, digest: str
) -> dict[str, Any] | None:
    """Return an artifact's manifest, or None if the caller may see no such artifact."""
    query = visible_to(actor).with_only_columns(artifacts.c.manifest)
    return await connection.scalar(query.where(artifacts.c.digest == digest))


async def find(
    connection: AsyncConnection, tenant_id: str | None, digest: str
) -> dict[str, Any] | None:
    """Return an artifact with its manifest, or None if the tenant may not use the artifact.

    A tenant of None means every tenant.
    """
    query = select(artifacts).where(
        artifacts.c.digest == digest, artifacts.c.retired_at.is_(None), granted(tenant_id)
    )
    found = (await connection.execute(query)).mappings().first()
    return None if found is None else {str(name): value for name, value in found.items()}


async def locked(connection: AsyncConnection, actor: Actor, digest: str) -> dict[str, Any] | None:
    """Return an artifact with its row locked, or None if the actor may see no such artifact."""
    query = visible_to(actor).where(artifacts.c.digest == digest).with_for_update(of=artifacts)
    found = (await connection.execute(query)).mappings().first()
    return None if found is None else {str(name): value for name, value in found.items()}


async def pin(connection: AsyncConnection, digest: str, *, is_pinned: bool) -> None:
    """Set whether an artifact is kept without references."""
    query = update(artifacts).where(artifacts.c.digest == digest)
    await connection.execute(query.values(is_pinned=is_pinned))


async def is_named(connection: AsyncConnection, digest: str) -> bool:
    """Return whether a model, release or base names an artifact."""
    query = select(artifacts.c.digest).where(
        artifacts.c.digest == digest, named(artifacts.c.digest)
    )
    return await connection.scalar(query) is not None


async def withdraw(connection: AsyncConnection, digest: str, tenant_id: str | None) -> bool:
    """Remove a tenant's grant of an artifact, and return whether there was a grant.

    A tenant of None means the public grant.
    """
    grant = artifact_grants.c
    query = delete(artifact_grants).where(
        grant.digest == digest, grant.tenant_id.is_not_distinct_from(tenant_id)
    )
    return (await connection.execute(query)).rowcount == 1


async def chunk_size(connection: AsyncConnection, actor: Actor, sha256: str) -> int | None:
    """Return the size of a visible artifact's chunk in bytes, or None without such a chunk."""
    of_seen = visible_to(actor).with_only_columns(artifacts.c.digest)
    is_seen = exists().where(
        artifact_chunks.c.sha256 == chunks.c.sha256, artifact_chunks.c.digest.in_(of_seen)
    )
    query = select(chunks.c.size_bytes).where(chunks.c.sha256 == sha256, is_seen)
    return await connection.scalar(query)
