"""Writes the decisions of scaling, which are records, numbers of replicas, and their changes."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.scaling.model import PREFILL, PoolPlan
from control_plane.scaling.scaled_pool import ScaledPool
from control_plane.scaling.tables import pool_scaling_states, pool_scalings, scaling_changes

Decided = Sequence[tuple[ScaledPool, PoolPlan]]  # a pool, or both of its roles


async def write_decision(
    connection: AsyncConnection,
    pool_id: str,
    memory: Mapping[str, Any],
    decision: Mapping[str, Any],
) -> None:
    """Store the record of a pool and the decision of a round."""
    values = {"memory": memory, "decision": decision, "decided_at": func.now()}
    query = insert(pool_scaling_states).values(pool_id=pool_id, **values)
    await connection.execute(query.on_conflict_do_update(index_elements=["pool_id"], set_=values))


async def write_numbers(connection: AsyncConnection, decided: Decided) -> None:
    """Set the decided numbers of replicas of a pool or of both of its roles."""
    prefill = next((it.wanted for pool, it in decided if pool.role == PREFILL), None)
    values = {
        "scaled_replicas": sum(it.wanted for _, it in decided),
        "scaled_sleepers": sum(it.asleep for _, it in decided),
        "scaled_prefill": prefill,
    }
    p = tables.pools.c
    is_other = or_(*(p[name].is_distinct_from(value) for name, value in values.items()))
    changed = update(tables.pools).where(p.id == decided[0][0].id, is_other)
    await connection.execute(changed.values(**values))
    for pool, it in decided:
        if pool.before != it.wanted:
            await _write_change(connection, pool, it)


async def _write_change(connection: AsyncConnection, pool: ScaledPool, decided: PoolPlan) -> None:
    last = decided.reasons[-1]
    await connection.execute(
        insert(scaling_changes).values(
            pool_id=pool.id,
            role=pool.role,
            before=pool.before,
            after=decided.wanted,
            cause=str(decided.decisive.cause),
            text="; ".join(reason.text for reason in decided.reasons)[:2000] or last.text,
        )
    )


async def release_numbers(connection: AsyncConnection) -> None:
    """Restore operators' numbers in pools that are no longer scaled, and remove expired pins."""
    p, s = tables.pools.c, pool_scalings.c
    is_over = update(pool_scalings).where(s.pin_until <= func.now())
    await connection.execute(
        is_over.values(pin=None, pin_prefill=None, pin_until=None, pinned_by="")
    )
    is_scaled = select(s.pool_id).where(s.pool_id == p.id, s.is_on).exists()
    held = or_(p.scaled_replicas.is_not(None), p.scaled_sleepers > 0)
    query = update(tables.pools).where(held, ~is_scaled)
    await connection.execute(
        query.values(scaled_replicas=None, scaled_sleepers=0, scaled_prefill=None)
    )
