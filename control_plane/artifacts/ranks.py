"""Ranks of adapters that pools serve, read in the caller's transactions."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.tables import pools
from sluice.adapter_ranks import RANK, SLOTS, adapter_rank_max
from sluice.errors import BadRequestError, ErrorCode


async def rank_max_of_base(connection: AsyncConnection, base_digest: str, otherwise: int) -> int:
    """Return the largest rank that a base's pools serve; `otherwise` where none has adapters."""
    query = select(pools.c.engine, pools.c.engine_options).where(pools.c.base_digest == base_digest)
    rows = (await connection.execute(query)).all()
    limits = [adapter_rank_max(engine, options) or 0 for engine, options in rows]
    return max(filter(None, limits), default=otherwise)


async def check_rank(connection: AsyncConnection, pool_id: str, rank: int) -> None:
    """Refuse a rank that a pool does not serve: BadRequestError with both numbers."""
    query = select(pools.c.engine, pools.c.engine_options).where(pools.c.id == pool_id)
    found = (await connection.execute(query)).first()
    limit = None if found is None else adapter_rank_max(found.engine, found.engine_options)
    if limit is None or rank <= limit:
        return
    served = f"ranks up to {limit}" if limit else "no adapters"
    option = f"{RANK}={rank}" if limit else f"{SLOTS}=8"
    message = (
        f"artifact_uri: the adapter has rank {rank}, pool {pool_id} serves {served}: train it with"
        f" a lower rank, or change the pool (sluice fleet pool update {pool_id} --option {option})"
    )
    raise BadRequestError(ErrorCode.ADAPTER_INVALID, message, param="artifact_uri")
