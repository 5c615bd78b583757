"""REST of pools, and the view of cells, replicas, nodes and routers."""

from aiohttp import web
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.fleet.bodies import PoolBody
from control_plane.fleet.model import ReplicaState
from control_plane.http import describe
from control_plane.http.resources import Resource, ResourceRoutes, Values, page
from control_plane.http.routes import Route
from sluice.errors import ErrorCode, PlatformError


async def _check_running(connection: AsyncConnection, key: str, values: Values) -> None:
    """Refuse to put another base or engine under replicas that run, and under models."""
    pools, replicas, models = tables.pools, tables.replicas, tables.models
    query = select(pools).where(pools.c.id == key).with_for_update()
    row = (await connection.execute(query)).first()
    if row is None:
        return
    if row.retire_at is not None:  # who writes it wants it, whatever a rollout left
        values |= {"retire_at": None, "rollout_replicas": None}
    if (row.base_digest, row.engine) == (values["base_digest"], values["engine"]):
        return
    for table, fix in ((replicas, "set replicas_wanted to 0 first"), (models, "move them first")):
        count = select(func.count()).select_from(table).where(table.c.pool_id == key)
        if await connection.scalar(count):
            message = f"pool {key} has {table.name}: make a new pool, or {fix}"
            raise PlatformError(ErrorCode.CONFLICT, message)


async def _make_cell(connection: AsyncConnection, key: str, _: Values) -> None:
    """Give the pool its cell."""
    query = insert(tables.cells).values(id=f"{key}-0", pool_id=key)
    await connection.execute(query.on_conflict_do_nothing())


POOLS = Resource(
    path="pools",
    table=tables.pools,
    shown=("id", *PoolBody.model_fields),
    read=Action.READ_PUBLIC,
    write=Action.WRITE_FLEET,
    body=PoolBody,
    before_write=_check_running,
    after_write=_make_cell,
)


class FleetRoutes:
    """Handlers of the fleet."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def routes(self) -> list[Route]:
        """Return the routes."""
        views = (
            (tables.cells, self.cells),
            (tables.replicas, self.replicas),
            (tables.nodes, self.nodes),
            (tables.routers, self.routers),
        )
        found = ResourceRoutes(self._database, POOLS).routes()
        for table, handler in views:
            name = str(table.name)
            told = describe.listing(f"List {name}", describe.shown(table.c.keys()))
            path, action = f"/v1/{name}", Action.READ_PLATFORM
            found.append(Route("GET", path, handler, action, name, told))
        return found

    async def cells(self, request: web.Request) -> web.Response:
        """Return cells and their owners."""
        t = tables.cells
        return await page(self._database, select(t), t.c.id, request, _times)

    async def replicas(self, request: web.Request) -> web.Response:
        """Return replicas, with what their agents last said."""
        t = tables.replicas
        return await page(self._database, select(t), t.c.id, request, _replica)

    async def nodes(self, request: web.Request) -> web.Response:
        """Return nodes and their facts."""
        t = tables.nodes
        return await page(self._database, select(t), t.c.id, request, _times)

    async def routers(self, request: web.Request) -> web.Response:
        """Return routers and when they were last here."""
        t = tables.routers
        return await page(self._database, select(t), t.c.id, request, _times)


def _replica(row: Values) -> Values:
    return row | {"state": ReplicaState(row["state"]).name.lower()}


def _times(row: Values) -> Values:
    return {
        name: value.isoformat() if hasattr(value, "isoformat") else value
        for name, value in row.items()
    }
