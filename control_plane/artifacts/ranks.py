"""Ranks of adapters, and those that pools serve, read in the caller's transactions."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.artifacts.adapter_config import CONFIG_FILE, largest_rank
from control_plane.artifacts.model import Kind
from control_plane.artifacts.tables import artifacts
from control_plane.tables import pools
from sluice.adapter_ranks import RANK, SLOTS, adapter_rank_max
from sluice.chunk_store import StoreDownError
from sluice.errors import BadRequestError, ErrorCode
from sluice.manifests import parse_manifest

ReadChunk = Callable[[str], Awaitable[bytes]]


async def rank_max_of_base(connection: AsyncConnection, base_digest: str, otherwise: int) -> int:
    """Return the largest rank that a base's pools serve; `otherwise` where none has adapters."""
    query = select(pools.c.engine, pools.c.engine_options).where(pools.c.base_digest == base_digest)
    rows = (await connection.execute(query)).all()
    limits = [adapter_rank_max(engine, options) or 0 for engine, options in rows]
    return max(filter(None, limits), default=otherwise)


async def rank_in_manifest(document: Any, read_chunk: ReadChunk) -> int:
    """Return the largest rank of an adapter by its manifest; 0: there is no manifest."""
    entry = None if document is None else parse_manifest(document).find(CONFIG_FILE)
    if entry is None:
        return 0
    pieces = [await read_chunk(sha256) for sha256 in entry.chunk_sha256s]
    return largest_rank(json.loads(b"".join(pieces)))


def adapter_check(read_chunk: ReadChunk) -> Callable[[AsyncConnection, dict[str, Any]], Any]:
    """Return a check of a model's fields: its pool serves the rank of its adapter.

    An adapter that is not in the store, or a store that is away, passes: a model goes back to an
    earlier release then, too.
    """

    async def check(connection: AsyncConnection, values: dict[str, Any]) -> None:
        a, digest = artifacts.c, values["adapter_digest"]
        if not digest:
            return
        query = select(a.manifest).where(a.digest == digest, a.kind == Kind.ADAPTER)
        try:
            rank = await rank_in_manifest(await connection.scalar(query), read_chunk)
        except StoreDownError:
            return
        await check_rank(connection, values["pool_id"], rank, param="adapter_digest")

    return check


async def check_rank(
    connection: AsyncConnection, pool_id: str, rank: int, param: str = "artifact_uri"
) -> None:
    """Refuse a rank that a pool does not serve: BadRequestError with both numbers."""
    query = select(pools.c.engine, pools.c.engine_options).where(pools.c.id == pool_id)
    found = (await connection.execute(query)).first()
    limit = None if found is None else adapter_rank_max(found.engine, found.engine_options)
    if limit is None or rank <= limit:
        return
    served = f"ranks up to {limit}" if limit else "no adapters"
    option = f"{RANK}={rank}" if limit else f"{SLOTS}=8"
    message = (
        f"{param}: the adapter has rank {rank}, pool {pool_id} serves {served}: train it with"
        f" a lower rank, or change the pool (sluice fleet pool update {pool_id} --option {option})"
    )
    raise BadRequestError(ErrorCode.ADAPTER_INVALID, message, param=param)
