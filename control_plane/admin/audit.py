"""Read-only REST of the audit log, the newest rows first."""

from aiohttp import web
from sqlalchemy import select

from control_plane.access.roles import Action
from control_plane.audit.tables import audit
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import moment
from control_plane.http.columns import columns
from control_plane.http.resources import Values, page
from control_plane.http.routes import AdminRoute

_FILTERS = {"actor": audit.c.actor_id, "kind": audit.c.kind, "object_id": audit.c.object_id}


class AuditRoutes:
    """The request handlers of the audit log."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        row = describe.shown(audit.c.keys(), types=columns(audit))
        for name in ("before", "after"):
            row["properties"][name] = {"type": ["object", "null"]}
        listing = describe.listing("List writes, newest first", row, (*_FILTERS, "since"))
        return [AdminRoute("GET", "/v1/audit", self.list, Action.READ_PLATFORM, "audit", listing)]

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of rows. `?after=` with the last id of a page returns older rows."""
        query = select(audit)
        for name, column in _FILTERS.items():
            if (wanted := request.query.get(name)) is not None:
                query = query.where(column == wanted.replace("\0", ""))
        if (since := request.query.get("since")) is not None:
            query = query.where(audit.c.at >= moment(since, "since"))
        return await page(self._database, query, audit.c.id, request, _show, newest_first=True)


def _show(row: Values) -> Values:
    return row | {"at": row["at"].isoformat()}
