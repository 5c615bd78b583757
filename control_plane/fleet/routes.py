"""REST of pools, and views of cells, replicas and routers. The REST of nodes is `node_routes`."""

from dataclasses import replace

from aiohttp import web
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.fleet import preparation
from control_plane.fleet.bodies import PoolBody
from control_plane.fleet.model import ReplicaState
from control_plane.fleet.node_routes import NodeRoutes, shown_times
from control_plane.http import describe
from control_plane.http.bodies import path_id
from control_plane.http.columns import columns
from control_plane.http.resources import (
    Hook,
    Resource,
    ResourceRoutes,
    Values,
    in_turn,
    no_check,
    page,
    shown,
)
from control_plane.http.routes import AdminRoute
from sluice.errors import ErrorCode, PlatformError


async def _check_running(connection: AsyncConnection, key: str, values: Values) -> None:
    """Refuse a change of base or engine while replicas run or models use the pool."""
    pools, replicas, models = tables.pools, tables.replicas, tables.models
    query = select(pools).where(pools.c.id == key).with_for_update()
    row = (await connection.execute(query)).first()
    if row is None:
        return
    if row.replicas_wanted != values["replicas_wanted"]:
        await preparation.pin(connection, key, values["replicas_wanted"])
    if row.retire_at is not None:  # an operator's write cancels a retirement after a rollout
        values |= {"retire_at": None}
        await preparation.end_demands(connection, key)
    if (row.base_digest, row.engine) == (values["base_digest"], values["engine"]):
        return
    for table, fix in ((replicas, "set replicas_wanted to 0 first"), (models, "move them first")):
        count = select(func.count()).select_from(table).where(table.c.pool_id == key)
        if await connection.scalar(count):
            message = f"pool {key} has {table.name}: make a new pool, or {fix}"
            raise PlatformError(ErrorCode.CONFLICT, message)


async def _check_unlisted(connection: AsyncConnection, key: str) -> None:
    """Refuse the deletion of a pool that is named in a model's list of pools."""
    t = tables.model_pools.c
    query = select(t.id).where(t.pools.contains([{"pool_id": key}])).order_by(t.id).limit(1)
    if model := await connection.scalar(query):
        message = f"pool {key} serves model {model}: take it out of the model's pools first"
        raise PlatformError(ErrorCode.CONFLICT, message)


async def _make_cell(connection: AsyncConnection, key: str, _: Values) -> None:
    """Create the first cell of a pool."""
    query = insert(tables.cells).values(id=f"{key}-0", pool_id=key)
    await connection.execute(query.on_conflict_do_nothing())


_REPLICA_FILTERS = ("pool_id", "node_id")
_STATUS = (
    *(
        "id",
        "replicas_wanted",
        "rollout_replicas",
        "scaled_replicas",
        "placed",
        "ready",
        "draining",
        "lost",
    ),
    *("unplaced", "condition", "since"),
)
_STATUS_TYPES = {
    **dict.fromkeys(("replicas_wanted", "placed", "ready", "draining", "lost"), describe.INTEGER),
    **dict.fromkeys(("rollout_replicas", "scaled_replicas"), describe.nullable(describe.INTEGER)),
    "unplaced": describe.INTEGER,
}
POOLS = Resource(
    path="pools",
    table=tables.pools,
    shown=("id", *PoolBody.model_fields),
    read=Action.READ_PUBLIC,
    write=Action.WRITE_FLEET,
    body=PoolBody,
    before_write=_check_running,
    before_delete=_check_unlisted,
    after_write=_make_cell,
)


class FleetRoutes:
    """The request handlers of the fleet."""

    def __init__(self, database: Database, check_pool: Hook = no_check) -> None:
        """Create the handlers. `check_pool` refuses invalid new fields of a pool."""
        self._database = database
        self._pools = replace(POOLS, before_write=in_turn(_check_running, check_pool))

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        views = (
            (tables.cells, self.cells),
            (tables.replicas, self.replicas),
            (tables.routers, self.routers),
        )
        found = ResourceRoutes(self._database, self._pools).routes()
        found.append(
            AdminRoute(
                "GET",
                "/v1/pools/{id:[^/]+}/status",
                self.pool_status,
                Action.READ_PLATFORM,
                "pools",
                describe.operation(
                    "Show a pool's replicas, wanted and ready",
                    answer=describe.shown(_STATUS, types=_STATUS_TYPES),
                ),
            )
        )
        for table, handler in views:
            name = str(table.name)
            types = columns(table) | ({"state": describe.TEXT} if table is tables.replicas else {})
            row = describe.shown(table.c.keys(), types=types)
            narrowed = _REPLICA_FILTERS if table is tables.replicas else ()
            told = describe.listing(f"List {name}", row, narrowed)
            path, action = f"/v1/{name}", Action.READ_PLATFORM
            found.append(AdminRoute("GET", path, handler, action, name, told))
        return [*found, *NodeRoutes(self._database).routes()]

    async def cells(self, request: web.Request) -> web.Response:
        """Return a page of cells with their owners."""
        t = tables.cells
        return await page(self._database, select(t), t.c.id, request, shown_times)

    async def replicas(self, request: web.Request) -> web.Response:
        """Return a page of replicas, with the last reports of their agents."""
        t = tables.replicas
        query = select(t)
        for name in _REPLICA_FILTERS:
            if (wanted := request.query.get(name)) is not None:
                query = query.where(t.c[name] == wanted.replace("\0", ""))
        return await page(self._database, query, t.c.id, request, _replica)

    async def pool_status(self, request: web.Request) -> web.Response:
        """Return the number of a pool's replicas, with the reason if replicas are missing."""
        key = path_id(request)

        async def work(connection: AsyncConnection) -> Values | None:
            return await _pool_status(connection, key)

        found = await self._database.run(work)
        if found is None:
            raise PlatformError(ErrorCode.NOT_FOUND, f"there is no pools/{key}")
        return shown(request, found)

    async def routers(self, request: web.Request) -> web.Response:
        """Return a page of routers, with the time when they were last connected."""
        t = tables.routers
        return await page(self._database, select(t), t.c.id, request, shown_times)


def _replica(row: Values) -> Values:
    return row | {"state": ReplicaState(row["state"]).name.lower()}


async def _pool_status(connection: AsyncConnection, key: str) -> Values | None:
    pool, said, t = tables.pools, tables.pool_conditions, tables.replicas.c
    query = (
        select(pool, said.c.text, said.c.unplaced, said.c.since)
        .outerjoin(said, said.c.pool_id == pool.c.id)
        .where(pool.c.id == key)
    )
    row = (await connection.execute(query)).first()
    if row is None:
        return None
    is_lost = t.state == int(ReplicaState.LOST)
    counts = await connection.execute(
        select(
            func.count().filter(~t.is_draining, ~is_lost),
            func.count().filter(~t.is_draining, ~t.sleeps, t.state == int(ReplicaState.READY)),
            func.count().filter(t.is_draining),
            func.count().filter(is_lost),
        ).where(t.pool_id == key)
    )
    placed, ready, draining, lost = counts.one()
    condition = row.text or ""
    if row.retire_at is not None:
        users = await preparation.users(connection, key)
        left = f", which waits for: {', '.join(users)}" if users else ""
        condition = f"its release was rolled out or back: goes to 0 replicas{left}"
    values = (
        *(key, row.replicas_wanted, row.rollout_replicas, row.scaled_replicas),
        *(placed, ready, draining, lost),
        *(row.unplaced or 0, condition, "" if row.since is None else row.since.isoformat()),
    )
    return dict(zip(_STATUS, values, strict=True))
