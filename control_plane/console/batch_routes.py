"""REST of batches and their progress for the console, restricted to what the caller may see."""

import re
from typing import Any

from aiohttp import web
from sqlalchemy import Select, select

from control_plane.access.roles import Action
from control_plane.batches.tables import batches
from control_plane.console.scope import own_tenant
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import path_id
from control_plane.http.resources import fetch, page_of, shown, visible
from control_plane.http.routes import AdminRoute
from sluice.errors import BadRequestError, ErrorCode, PlatformError

_T = batches.c
_SHOWN = (
    *("id", "number", "tenant_id", "key_id", "endpoint", "status", "total", "completed", "failed"),
    *("created_at_unix_ms", "expires_at_unix_ms", "reached_at_unix_ms"),
    *("input_file_id", "output_file_id", "error_file_id"),
)
_PATH = "/console/data/batches"
_FILTERS = ("tenant", "status", "before", "limit")


class ConsoleBatches:
    """The request handlers of the console's batches."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        read, every = Action.READ_USAGE, describe.operation("For the console", query=_FILTERS)
        one = describe.operation("For the console")
        return [
            AdminRoute("GET", _PATH, self.list, read, "batches", every),
            AdminRoute("GET", f"{_PATH}/{{id}}", self.show, read, "batches", one),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Return the newest batches.

        The query parameter `before` is the number of the last batch of the previous page.
        """
        limit, _ = page_of(request)
        query = visible(request, _rows(), _T.tenant_id)
        if tenant := own_tenant(request):
            query = query.where(_T.tenant_id == tenant)
        if status := request.query.get("status"):
            query = query.where(_T.status == status.replace("\0", ""))
        if before := request.query.get("before"):
            query = query.where(_T.number < _number(before))
        rows = await fetch(self._database, query.order_by(_T.number.desc()).limit(limit + 1))
        body: dict[str, Any] = {"data": rows[:limit], "has_more": len(rows) > limit}
        return shown(request, body)

    async def show(self, request: web.Request) -> web.Response:
        """Return one batch. A batch of another tenant is a 404."""
        key = path_id(request)
        query = visible(request, _rows().where(_T.id == key), _T.tenant_id)
        rows = await fetch(self._database, query)
        if not rows:
            raise PlatformError(ErrorCode.NOT_FOUND, f"there is no batches/{key}")
        return shown(request, rows[0])


def _rows() -> Select[Any]:
    return select(*(_T[name] for name in _SHOWN))


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        message = "before: the number of a batch is expected"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="before")
    return int(text)
