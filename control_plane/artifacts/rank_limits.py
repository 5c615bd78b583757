"""Refuses to lower the rank limit of a pool below the ranks of the adapters that it serves."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Select, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.artifacts.model import Kind
from control_plane.artifacts.ranks import AdapterChecks, ReadChunk, rank_in_manifest
from control_plane.artifacts.tables import artifacts
from control_plane.http.resources import Hook, no_check
from control_plane.models.model import RELEASE_MARK
from control_plane.tables import aliases, model_pools, models, pools, releases, splits, tenants
from sluice.adapter_ranks import RANK, SLOTS, adapter_rank_max
from sluice.errors import ErrorCode, PlatformError

_READS_AT_ONCE = 16
_DEADLINE_S = 3.0  # Seconds for all reads. Ranks that were read are cached for the next attempt.
_KNOWN_MAX = 4096
_NAMES_MAX = 5


class RankChecks(NamedTuple):
    """The checks of writes, which refuse a write if a pool would not serve an adapter's rank.

    Attributes:
        model: Check of a model's fields.
        model_pools: Check of the pools that share a model's requests.
        pool: Check of a pool's fields.
    """

    model: Hook = no_check
    model_pools: Hook = no_check
    pool: Hook = no_check


def rank_checks(read_chunk: ReadChunk) -> RankChecks:
    """Return the checks for a control plane with an artifact store."""
    adapters = AdapterChecks(read_chunk)
    return RankChecks(adapters.check_model, adapters.check_pools, pool_check(read_chunk))


def pool_check(read_chunk: ReadChunk) -> Hook:
    """Return a check that a pool with its new fields still serves the adapters of its models."""
    known: dict[str, int] = {}  # Cached ranks by digest. The rank of a digest never changes.

    async def check(connection: AsyncConnection, key: str, values: dict[str, Any]) -> None:
        query = select(pools.c.engine, pools.c.engine_options).where(pools.c.id == key)
        before = (await connection.execute(query)).first()
        limit = adapter_rank_max(values["engine"], values["engine_options"])
        if before is None or limit is None:
            return
        was = adapter_rank_max(before.engine, before.engine_options)
        if was is not None and was <= limit:
            return
        served = await _served(connection, key)
        await _learn(connection, known, served.keys() - known.keys(), read_chunk)
        over = [
            (name, known.get(digest, 0))
            for digest, names in served.items()
            for name in names
            if known.get(digest, 0) > limit
        ]
        while len(known) > _KNOWN_MAX:
            del known[next(iter(known))]
        if over:
            raise refusal(key, limit, sorted(over))

    return check


def refusal(pool_id: str, limit: int, over: Sequence[tuple[str, int]]) -> PlatformError:
    """Return the error for adapters whose rank exceeds the new limit.

    Args:
        pool_id: Pool that is changed.
        limit: Largest rank that the pool would serve, or 0 if it would serve no adapters.
        over: Models or releases, each with the rank of its adapter.
    """
    told = [f"{name} (rank {rank})" for name, rank in over[:_NAMES_MAX]]
    if len(over) > _NAMES_MAX:
        told.append(f"{len(over) - _NAMES_MAX} more")
    would = f"ranks up to {limit}" if limit else "no adapters"
    most = max(rank for _, rank in over)
    keep = f"{RANK}={most}" if limit else f"{SLOTS}=8"
    message = (
        f"engine_options: pool {pool_id} would serve {would}, and these need more:"
        f" {', '.join(told)}; keep the option {keep}, or move them to another pool first"
    )
    return PlatformError(ErrorCode.CONFLICT, message, param="engine_options")


async def _learn(
    connection: AsyncConnection, known: dict[str, int], digests: set[str], read_chunk: ReadChunk
) -> None:
    """Add the ranks of adapters to `known`, with rank 0 for an adapter that the store lacks.

    Raises:
        PlatformError: The store did not answer for all adapters in time.
    """
    a = artifacts.c
    query = select(a.digest, a.manifest).where(a.digest.in_(sorted(digests)))
    rows = (await connection.execute(query.where(a.kind == Kind.ADAPTER))).all()
    room = asyncio.Semaphore(_READS_AT_ONCE)

    async def read(digest: str, document: Mapping[str, Any]) -> None:
        async with room:
            known[digest] = await rank_in_manifest(document, read_chunk)

    try:
        async with asyncio.timeout(_DEADLINE_S):
            await asyncio.gather(*(read(digest, document) for digest, document in rows))
    except TimeoutError:
        message = f"the ranks of {len(rows)} adapters could not be read in time; try again"
        raise PlatformError(ErrorCode.UNAVAILABLE, message, retry_after_s=2.0) from None


async def _served(connection: AsyncConnection, pool_id: str) -> dict[str, list[str]]:
    """Return the adapters that requests to a pool may need, with their models and releases."""
    found: dict[str, set[str]] = {}
    for query in (_of_models(pool_id), _of_releases(pool_id)):
        for name, digest in await connection.execute(query):
            found.setdefault(digest, set()).add(name)
    return {digest: sorted(names) for digest, names in found.items()}


def _of_models(pool_id: str) -> Select[Any, Any]:
    """Return the query of models with an adapter that the pool serves, alone or with others."""
    shared = select(model_pools.c.id).where(
        model_pools.c.pools.contains([{"pool_id": pool_id, "is_other_base": False}])
    )
    is_here = or_(models.c.pool_id == pool_id, models.c.id.in_(shared))
    return select(models.c.id, models.c.adapter_digest).where(
        models.c.adapter_digest != "", is_here
    )


def _of_releases(pool_id: str) -> Select[Any, Any]:
    """Return the query of the pool's releases with an adapter to which requests may be routed.

    Each of these releases is in a rollout, pinned by a tenant, or named by an alias.
    """
    r, s = releases.c, splits.c
    arms = [s.id + RELEASE_MARK + arm for arm in (s.control, s.canary)]
    is_split = select(s.id).where(or_(*(arm == r.id for arm in arms))).exists()
    is_aliased = select(aliases.c.id).where(aliases.c.release_id == r.id).exists()
    pin = r.model_id + RELEASE_MARK + tenants.c.pins[r.model_id].astext
    is_pinned = select(tenants.c.id).where(tenants.c.pins.has_key(r.model_id), pin == r.id).exists()
    is_used = or_(is_split, is_aliased, is_pinned)
    return select(r.id, r.adapter_digest).where(
        r.pool_id == pool_id, r.adapter_digest != "", is_used
    )
