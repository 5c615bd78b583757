"""Reads the ranks of adapters, and the ranks that pools serve, in the caller's transactions."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.artifacts.adapter_config import CONFIG_FILE, largest_rank
from control_plane.artifacts.model import Kind
from control_plane.artifacts.tables import artifacts
from control_plane.tables import model_pools, models, pools
from sluice.adapter_ranks import RANK, SLOTS, adapter_rank_max
from sluice.chunk_store import StoreDownError
from sluice.errors import BadRequestError, ErrorCode
from sluice.manifests import parse_manifest

ReadChunk = Callable[[str], Awaitable[bytes]]


async def rank_max_of_base(connection: AsyncConnection, base_digest: str, otherwise: int) -> int:
    """Return the largest rank that a base's pools serve, or `otherwise` if none serves adapters."""
    query = select(pools.c.engine, pools.c.engine_options).where(pools.c.base_digest == base_digest)
    rows = (await connection.execute(query)).all()
    limits = [adapter_rank_max(engine, options) or 0 for engine, options in rows]
    return max(filter(None, limits), default=otherwise)


async def rank_in_manifest(document: Any, read_chunk: ReadChunk) -> int:
    """Return the largest rank of an adapter from its manifest, or 0 without a manifest."""
    entry = None if document is None else parse_manifest(document).find(CONFIG_FILE)
    if entry is None:
        return 0
    pieces = [await read_chunk(sha256) for sha256 in entry.chunk_sha256s]
    return largest_rank(json.loads(b"".join(pieces)))


@dataclass(frozen=True, slots=True)
class AdapterChecks:
    """Checks that each pool of a model serves the rank of the model's adapter.

    A check passes if the adapter is not in the store or the store is down. So a model can return to
    an earlier release in these cases as well.

    Attributes:
        read_chunk: Reads a chunk of the store.
    """

    read_chunk: ReadChunk

    async def check_model(
        self, connection: AsyncConnection, key: str, values: dict[str, Any]
    ) -> None:
        """Check a model's adapter against the model's pool and the other pools of its requests."""
        rank = await self._rank(connection, values["adapter_digest"])
        for pool_id in (values["pool_id"], *await other_pools(connection, key)):
            await check_rank(connection, pool_id, rank, param="adapter_digest")

    async def check_pools(
        self, connection: AsyncConnection, key: str, values: dict[str, Any]
    ) -> None:
        """Check the pools that will share the requests of a model."""
        query = select(models.c.adapter_digest).where(models.c.id == key)
        rank = await self._rank(connection, await connection.scalar(query) or "")
        for pool_id in pools_of_base(values["pools"]):
            await check_rank(connection, pool_id, rank, param="pools")

    async def _rank(self, connection: AsyncConnection, digest: str) -> int:
        if not digest:
            return 0
        a = artifacts.c
        query = select(a.manifest).where(a.digest == digest, a.kind == Kind.ADAPTER)
        try:
            return await rank_in_manifest(await connection.scalar(query), self.read_chunk)
        except StoreDownError:
            return 0


async def other_pools(connection: AsyncConnection, model_id: str) -> list[str]:
    """Return the further pools of a model that receive requests with the model's adapter."""
    query = select(model_pools.c.pools).where(model_pools.c.id == model_id)
    return pools_of_base(await connection.scalar(query) or ())


def pools_of_base(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the pools of a model's list that receive requests with the model's adapter."""
    return [entry["pool_id"] for entry in entries if not entry["is_other_base"]]


async def check_rank(
    connection: AsyncConnection, pool_id: str, rank: int, param: str = "artifact_uri"
) -> None:
    """Refuse a rank that a pool does not serve. Raises BadRequestError with both ranks."""
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
