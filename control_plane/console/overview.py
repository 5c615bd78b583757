"""Reads the platform's state in one transaction, with missing replicas and waiting requests."""

from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.alerts.tables import alerts, incidents
from control_plane.fleet.model import ReplicaState
from control_plane.quality.tables import quarantines
from control_plane.rollouts.tables import rollouts
from control_plane.scaling.tables import cell_demands

Json = dict[str, Any]

FRESH_S = 60.0  # seconds after which a router's report no longer describes the present
_POOLS_MAX = 1000  # largest number of pools in an answer
_SHOWN_STATES = (
    ReplicaState.READY,
    ReplicaState.STARTING,
    ReplicaState.SLEEPING,
    ReplicaState.FAILED,
    ReplicaState.LOST,
)
# index of the number of waiting requests in a tier's row, as `control_plane.scaling.work.checked`
# writes the row
_QUEUED = 4


async def overview(connection: AsyncConnection) -> Json:
    """Return counts of objects, replicas by pool and state, and waiting and running requests."""
    counts = (await connection.execute(_counts())).mappings().one()
    return {
        "counts": dict(counts),
        "pools": await _pools(connection),
        "load": await load(connection),
    }


def _counts() -> Select[*tuple[Any, ...]]:
    t = tables
    live = rollouts.c.is_live

    def count(column: ColumnElement[Any], *where: ColumnElement[bool]) -> ColumnElement[int]:
        return select(func.count(column)).where(*where).scalar_subquery()

    return select(
        count(t.tenants.c.id).label("tenants"),
        count(t.models.c.id).label("models"),
        count(t.nodes.c.id).label("nodes"),
        count(t.nodes.c.id, t.nodes.c.is_lost).label("nodes_lost"),
        count(t.nodes.c.id, t.nodes.c.is_cordoned).label("nodes_cordoned"),
        count(t.routers.c.id, ~t.routers.c.is_gone).label("routers"),
        count(rollouts.c.id, live).label("rollouts_live"),
        count(rollouts.c.id, live, rollouts.c.phase == "paused").label("rollouts_paused"),
        count(t.budget_stops.c.id, func.jsonb_array_length(t.budget_stops.c.stops) > 0).label(
            "tenants_stopped"
        ),
        count(quarantines.c.id, quarantines.c.released_at.is_(None)).label("quarantines"),
        count(alerts.c.id, alerts.c.is_firing, ~alerts.c.is_silenced).label("alerts"),
        count(incidents.c.id, incidents.c.is_open).label("incidents_open"),
    )


async def _pools(connection: AsyncConnection) -> list[Json]:
    """Return the wanted and present replicas of each pool, and the reason for a difference."""
    p, said, r = tables.pools.c, tables.pool_conditions.c, tables.replicas.c
    states = {
        state.name.lower(): func.count(r.id).filter(r.state == int(state), ~r.is_draining)
        for state in _SHOWN_STATES
    }
    wanted = func.coalesce(p.scaled_replicas, p.replicas_wanted)
    query = (
        select(
            p.id,
            func.greatest(wanted, func.coalesce(p.rollout_replicas, 0)).label("wanted"),
            func.coalesce(func.max(said.text), "").label("condition"),
            func.count(r.id).filter(r.is_draining).label("draining"),
            *(counted.label(name) for name, counted in states.items()),
        )
        .select_from(
            tables.pools.outerjoin(tables.pool_conditions, said.pool_id == p.id).outerjoin(
                tables.replicas, r.pool_id == p.id
            )
        )
        .group_by(p.id)
        .order_by(p.id)
        .limit(_POOLS_MAX)
    )
    return [dict(row) for row in (await connection.execute(query)).mappings()]


async def load(connection: AsyncConnection) -> list[Json]:
    """Return the waiting requests by priority, and the running requests, of each reported cell."""
    t = cell_demands.c
    is_fresh = t.received_at > func.now() - timedelta(seconds=FRESH_S)
    query = (
        select(t.cell_id, tables.cells.c.pool_id, t.router_id, t.report)
        .join(tables.cells, tables.cells.c.id == t.cell_id)
        .where(is_fresh, tables.cells.c.router_id == t.router_id)
        .order_by(t.cell_id)
        .limit(_POOLS_MAX)
    )
    return [
        {
            "cell_id": row.cell_id,
            "pool_id": row.pool_id,
            "router_id": row.router_id,
            "running": row.report["running"],
            "ready": row.report["ready"],
            "queued": {name: it[_QUEUED] for name, it in row.report["tiers"].items()},
        }
        for row in await connection.execute(query)
    ]
