"""Queries of distribution, in the transactions they are given."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.artifacts.tables import artifact_chunks, artifacts
from control_plane.distribution.model import Artifact
from sluice.manifests import CHUNK_BYTES

_PAIRS = "unnest(CAST(:nodes AS text[]), CAST(:digests AS text[]))"
_ADD = text(
    f"INSERT INTO node_artifacts (node_id, digest) SELECT * FROM {_PAIRS}"  # noqa: S608 - constants
    " ON CONFLICT DO NOTHING"
)
_REMOVE = text(
    "DELETE FROM node_artifacts AS held WHERE node_id = ANY(CAST(:told AS text[]))"  # noqa: S608
    f" AND NOT EXISTS (SELECT FROM {_PAIRS} AS pair (node_id, digest)"
    " WHERE pair.node_id = held.node_id AND pair.digest = held.digest)"
)
# A node that is only a moment old may speak of its artifacts before it is known itself.
_REMOVE_GONE = text(
    "DELETE FROM node_artifacts AS held WHERE"
    " EXISTS (SELECT FROM nodes WHERE nodes.id = held.node_id AND nodes.is_lost)"
    " OR since < now() - interval '1 minute'"
    " AND NOT EXISTS (SELECT FROM nodes WHERE nodes.id = held.node_id)"
)


async def known(connection: AsyncConnection, digests: Collection[str]) -> list[Artifact]:
    """Return those of some artifacts that the store has."""
    t, chunks = artifacts.c, artifact_chunks.c
    query = (
        select(t.digest, func.count(chunks.sha256))
        .outerjoin(artifact_chunks, chunks.digest == t.digest)
        .where(t.digest.in_(digests), t.retired_at.is_(None))
        .group_by(t.digest)
    )
    # Of files that are all empty there is no chunk; one is planned that nobody has to fetch.
    found = (await connection.execute(query)).tuples()
    return [Artifact(digest, max(1, count), CHUNK_BYTES) for digest, count in found]


async def manifest(connection: AsyncConnection, digest: str) -> dict[str, Any] | None:
    """Return the manifest of an artifact; None when there is none."""
    query = select(artifacts.c.manifest).where(
        artifacts.c.digest == digest, artifacts.c.retired_at.is_(None)
    )
    return await connection.scalar(query)


async def write_complete(
    connection: AsyncConnection, complete: Mapping[str, Iterable[str]]
) -> None:
    """Note what lies complete on some nodes, by node, in place of what was noted before."""
    pairs = [(node_id, digest) for node_id, digests in complete.items() for digest in digests]
    values = {"nodes": [node_id for node_id, _ in pairs], "digests": [d for _, d in pairs]}
    await connection.execute(_ADD, values)
    await connection.execute(_REMOVE, {**values, "told": list(complete)})


async def remove_gone(connection: AsyncConnection) -> None:
    """Forget what lies on nodes that are lost, or that nobody knows any more."""
    await connection.execute(_REMOVE_GONE)
