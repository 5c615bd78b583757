"""Artifacts that were accepted, as a tenant may see them, in the transactions they are given."""

from typing import Any

from sqlalchemy import Select, exists, select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action, Actor, Reach
from control_plane.artifacts.tables import artifact_chunks, artifact_grants, artifacts, chunks
from control_plane.artifacts.uploads import granted

SHOWN = ("digest", "kind", "base_digests", "size_bytes", "file_count", "is_pinned", "created_at")


def seen_by(actor: Actor) -> Select[Any]:
    """Return the query of the artifacts that somebody may see, without their manifests."""
    query = select(*(artifacts.c[name] for name in SHOWN)).where(artifacts.c.retired_at.is_(None))
    if actor.reach(Action.READ_TENANT) is Reach.ALL:
        return query
    return query.where(granted(actor.tenant_id))


async def manifest_of(
    connection: AsyncConnection, actor: Actor, digest: str
) -> dict[str, Any] | None:
    """Return an artifact's manifest; None when there is none that the caller may see."""
    query = seen_by(actor).with_only_columns(artifacts.c.manifest)
    return await connection.scalar(query.where(artifacts.c.digest == digest))


async def find(
    connection: AsyncConnection, tenant_id: str | None, digest: str
) -> dict[str, Any] | None:
    """Return an artifact with its manifest, if a tenant may use it; None: if everybody may."""
    query = select(artifacts).where(
        artifacts.c.digest == digest, artifacts.c.retired_at.is_(None), granted(tenant_id)
    )
    found = (await connection.execute(query)).mappings().first()
    return None if found is None else {str(name): value for name, value in found.items()}


async def tenants_of(connection: AsyncConnection, digest: str) -> list[str]:
    """Return the tenants whose artifact it is; an empty id stands for everybody."""
    query = select(artifact_grants.c.tenant_id).where(artifact_grants.c.digest == digest)
    return sorted(tenant or "" for tenant in (await connection.scalars(query)).all())


async def chunk_size(connection: AsyncConnection, actor: Actor, sha256: str) -> int | None:
    """Return the size of a chunk of an artifact that somebody may see; None when there is none."""
    of_seen = seen_by(actor).with_only_columns(artifacts.c.digest)
    is_seen = exists().where(
        artifact_chunks.c.sha256 == chunks.c.sha256, artifact_chunks.c.digest.in_(of_seen)
    )
    query = select(chunks.c.size_bytes).where(chunks.c.sha256 == sha256, is_seen)
    return await connection.scalar(query)
