"""REST of nodes, which shows reports of agents, accepts operators' orders, and lifts cordons.

The orders have the separate resource `/v1/nodes/{id}/desired`, so that their ETag does not change
with every heartbeat.
"""

from typing import Any

from aiohttp import web
from sqlalchemy import delete, exists, func, select, update

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.fleet.bodies import NodeOrders
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.columns import columns
from control_plane.http.resources import Values, fetch, first, page, shown
from control_plane.http.routes import AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from control_plane.tables import nodes, replicas
from sluice.errors import ErrorCode, PlatformError

_EVERY = "/v1/nodes"
_ONE = "/v1/nodes/{id:[^/]+}"
_ORDERS = ("id", *NodeOrders.model_fields)
_READ, _WRITE = Action.READ_PLATFORM, Action.WRITE_FLEET
_HELD = (
    select(func.count()).where(replicas.c.node_id == nodes.c.id).scalar_subquery().label("replicas")
)


class NodeRoutes:
    """The request handlers of nodes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writes = Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        types = columns(nodes) | {"replicas": describe.INTEGER}
        told = describe.shown((*nodes.c.keys(), "replicas"), types=types)
        orders = describe.shown(_ORDERS, NodeOrders)
        operation = describe.operation
        return [
            AdminRoute(
                "GET", _EVERY, self.list, _READ, "nodes", describe.listing("List nodes", told)
            ),
            AdminRoute(
                *("GET", _ONE, self.get, _READ, "nodes"),
                operation("Show a node", answer=told),
            ),
            AdminRoute(
                *("DELETE", _ONE, self.forget, _WRITE, "nodes"),
                operation("Forget a node that is lost and has no replicas"),
            ),
            AdminRoute(
                *("GET", f"{_ONE}/desired", self.get_orders, _READ, "nodes"),
                operation("Show the desired state of a node", answer=orders),
            ),
            AdminRoute(
                *("PUT", f"{_ONE}/desired", self.put_orders, _WRITE, "nodes"),
                operation("Cordon, drain or release a node", answer=orders, body=NodeOrders),
            ),
            AdminRoute(
                *("DELETE", f"{_ONE}/cordons/{{cordon:.+}}", self.lift, _WRITE, "cordons"),
                operation("Lift a cordon that the node's agent has set on an accelerator"),
            ),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of nodes with their reported facts."""
        query = select(nodes, _HELD)
        return await page(self._database, query, nodes.c.id, request, shown_times)

    async def get(self, request: web.Request) -> web.Response:
        """Return one node."""
        return shown(request, shown_times(await self._row(path_id(request))))

    async def get_orders(self, request: web.Request) -> web.Response:
        """Return the orders for one node."""
        return shown(request, _orders(await self._row(path_id(request))))

    async def put_orders(self, request: web.Request) -> web.Response:
        """Replace the orders for one node. The fleet's leader carries the orders out."""
        key = path_id(request)
        body = await read_body(request, NodeOrders)
        values = {
            "is_unschedulable": body.is_unschedulable or body.is_draining,
            "is_draining": body.is_draining,
            "order_reason": body.reason,
        }

        async def work(write: Write) -> WriteReply:
            row = await _locked(write, key)
            before = _orders(row)
            write.check(before)
            after = _orders(row | values)
            write.record("change", key, before, after, owners=[None])
            await write.connection.execute(update(nodes).where(nodes.c.id == key).values(**values))
            return WriteReply(after, key)

        return await self._writes.run(request, work)

    async def lift(self, request: web.Request) -> web.Response:
        """Order the node's agent to return an accelerator to service (204)."""
        key, cordon_id = path_id(request), request.match_info["cordon"]

        async def work(write: Write) -> WriteReply:
            row = await _locked(write, key)
            cordons = [fact["cordon"] for fact in row["accelerator_facts"] if "cordon" in fact]
            found = next((cordon for cordon in cordons if cordon["id"] == cordon_id), None)
            if found is None:
                raise PlatformError(
                    ErrorCode.NOT_FOUND,
                    f"node {key} has no such cordon; `sluice fleet nodes` lists them",
                )
            write.record("lift", cordon_id, found, None, owners=[None])
            lifted = sorted({*row["lifted_cordons"], cordon_id})
            await write.connection.execute(
                update(nodes).where(nodes.c.id == key).values(lifted_cordons=lifted)
            )
            return WriteReply(None, cordon_id, 204)

        return await self._writes.run(request, work)

    async def forget(self, request: web.Request) -> web.Response:
        """Delete a lost node without replicas (204). Any other node is refused (409)."""
        key = path_id(request)

        async def work(write: Write) -> WriteReply:
            row = await _locked(write, key)
            held = exists().where(replicas.c.node_id == key)
            if not row["is_lost"] or await write.connection.scalar(select(held)):
                message = f"node {key} is not lost, or has replicas: drain it, and stop its agent"
                raise PlatformError(ErrorCode.CONFLICT, message)
            write.record("delete", key, _orders(row), None, owners=[None])
            await write.connection.execute(delete(nodes).where(nodes.c.id == key))
            return WriteReply(None, key, 204)

        return await self._writes.run(request, work)

    async def _row(self, key: str) -> Values:
        found = await fetch(self._database, select(nodes, _HELD).where(nodes.c.id == key))
        if not found:
            raise _unknown(key)
        return found[0]


def shown_times(row: Values) -> Values:
    """Return a row with its times in ISO 8601."""
    return {
        name: value.isoformat() if hasattr(value, "isoformat") else value
        for name, value in row.items()
    }


async def _locked(write: Write, key: str) -> dict[str, Any]:
    query = select(nodes).where(nodes.c.id == key).with_for_update()
    row = await first(write.connection, query)
    if row is None:
        raise _unknown(key)
    return row


def _orders(row: Values) -> Values:
    return {
        "id": row["id"],
        "is_unschedulable": row["is_unschedulable"],
        "is_draining": row["is_draining"],
        "reason": row["order_reason"],
    }


def _unknown(key: str) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no nodes/{key}")
