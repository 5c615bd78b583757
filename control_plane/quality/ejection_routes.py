"""REST of ejections, which are replicas that routers ejected for wrong answers."""

from aiohttp import web
from sqlalchemy import Text, cast, func, select

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.fleet.node_routes import shown_times
from control_plane.http import describe
from control_plane.http.columns import columns
from control_plane.http.resources import page
from control_plane.http.routes import AdminRoute
from control_plane.quality.tables import ejections

_SHOWN = (
    *("replica_id", "router_id", "cell_id", "epoch", "evidence", "wrong", "asked"),
    *("ejected_at_unix_ms", "heard_at", "ended_at", "outcome"),
)
# Id of a row, which sorts chronologically. No two ejections have the same replica, router and time.
_ID = func.concat_ws(
    "/",
    func.lpad(cast(ejections.c.ejected_at_unix_ms, Text), 19, "0"),
    ejections.c.replica_id,
    ejections.c.router_id,
)


class EjectionRoutes:
    """The request handler of ejections."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def routes(self) -> list[AdminRoute]:
        """Return the route of the handler."""
        types = columns(ejections) | {"id": describe.TEXT}
        told = describe.listing(
            "List replicas that routers ejected for their answers, the newest first",
            describe.shown(("id", *_SHOWN), types=types),
        )
        action, kind = Action.READ_PLATFORM, "ejections"
        return [AdminRoute("GET", "/v1/ejections", self.list, action, kind, told)]

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of the ejections of the last seven days, the newest first."""
        query = select(_ID.label("id"), *(ejections.c[name] for name in _SHOWN))
        return await page(self._database, query, _ID, request, shown_times, newest_first=True)
