"""Queries of artifacts, and of the nodes that have them, in the caller's transactions."""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.artifacts.tables import artifact_chunks, artifacts
from control_plane.distribution.model import Artifact
from control_plane.distribution.tables import fleet_secrets, node_artifacts
from control_plane.fleet.next_tables import next_places
from sluice.manifests import CHUNK_BYTES

_PAIRS = "unnest(CAST(:nodes AS text[]), CAST(:digests AS text[]))"
_ADD = text(
    f"INSERT INTO node_artifacts (node_id, digest) SELECT * FROM {_PAIRS}"  # noqa: S608 - constants
    " ON CONFLICT DO NOTHING"
)
_REMOVE = text(
    f"DELETE FROM node_artifacts AS held USING {_PAIRS} AS pair (node_id, digest)"  # noqa: S608
    " WHERE pair.node_id = held.node_id AND pair.digest = held.digest"
)
# An agent may report artifacts a moment before its node is stored, so young rows are not deleted.
_REMOVE_ORPHANS = text(
    "DELETE FROM node_artifacts AS held WHERE"
    " EXISTS (SELECT FROM nodes WHERE nodes.id = held.node_id AND nodes.is_lost)"
    " OR since < now() - interval '1 minute'"
    " AND NOT EXISTS (SELECT FROM nodes WHERE nodes.id = held.node_id)"
)


async def known(connection: AsyncConnection, digests: Collection[str]) -> list[Artifact]:
    """Return the given artifacts that are in the store."""
    t, chunks = artifacts.c, artifact_chunks.c
    query = (
        select(t.digest, func.count(chunks.sha256))
        .outerjoin(artifact_chunks, chunks.digest == t.digest)
        .where(t.digest.in_(digests), t.retired_at.is_(None))
        .group_by(t.digest)
    )
    # An artifact of empty files has no chunks. It is planned as one chunk, which no node has to
    # fetch.
    found = (await connection.execute(query)).tuples()
    return [Artifact(digest, max(1, count), CHUNK_BYTES) for digest, count in found]


async def manifest(connection: AsyncConnection, digest: str) -> dict[str, Any] | None:
    """Return the manifest of an artifact, or None if the artifact does not exist."""
    query = select(artifacts.c.manifest).where(
        artifacts.c.digest == digest, artifacts.c.retired_at.is_(None)
    )
    return await connection.scalar(query)


async def secret(connection: AsyncConnection, name: str, if_none: bytes) -> bytes:
    """Return the fleet's secret. If there is none yet, `if_none` is stored as the secret."""
    t = fleet_secrets.c
    values = {"name": name, "secret": if_none}
    await connection.execute(insert(fleet_secrets).values(values).on_conflict_do_nothing())
    query = select(t.secret).where(t.name == name)
    return (await connection.execute(query)).scalar_one()


async def ahead(connection: AsyncConnection) -> dict[str, frozenset[str]]:
    """Return the pools whose bases each node fetches ahead, by node."""
    found: dict[str, set[str]] = {}
    for pool_id, node_id in (await connection.execute(select(next_places))).tuples():
        found.setdefault(node_id, set()).add(pool_id)
    return {node_id: frozenset(pool_ids) for node_id, pool_ids in found.items()}


async def complete_on(connection: AsyncConnection, node_id: str) -> set[str]:
    """Return the recorded complete artifacts of a node, as digests."""
    held = node_artifacts.c
    return set(await connection.scalars(select(held.digest).where(held.node_id == node_id)))


async def counts(connection: AsyncConnection, node_ids: Collection[str]) -> dict[str, int]:
    """Return the number of recorded complete artifacts of each node."""
    held = node_artifacts.c
    query = select(held.node_id, func.count()).where(held.node_id.in_(node_ids))
    found = (await connection.execute(query.group_by(held.node_id))).tuples()
    return dict.fromkeys(node_ids, 0) | dict(found.all())


async def write_complete(
    connection: AsyncConnection,
    added: Mapping[str, Collection[str]],
    removed: Mapping[str, Collection[str]],
) -> None:
    """Record artifacts that became complete or are no longer complete, by node."""
    for statement, by_node in ((_ADD, added), (_REMOVE, removed)):
        pairs = [(node_id, digest) for node_id, digests in by_node.items() for digest in digests]
        if pairs:
            values = {"nodes": [n for n, _ in pairs], "digests": [d for _, d in pairs]}
            await connection.execute(statement, values)


async def remove_lost(connection: AsyncConnection) -> None:
    """Delete the records of lost or unknown nodes."""
    await connection.execute(_REMOVE_ORPHANS)
