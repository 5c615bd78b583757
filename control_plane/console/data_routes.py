"""REST of an overview and of figures of requests, for the console only.

Readers and publishers see only their own tenant. Ids of other tenants cause a 404.
"""

import json
from typing import Any
from urllib.parse import quote

from aiohttp import web

from control_plane.access.roles import Action
from control_plane.console.overview import overview
from control_plane.console.scope import own_tenant
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.routes import AdminRoute
from control_plane.telemetry_client import FeedDownError
from control_plane.telemetry_reader import TelemetryAnswer, TelemetryReader
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.ids import is_request_id

_READ, _PLATFORM = Action.READ_USAGE, Action.READ_PLATFORM
_REQUESTS = ("tenant", "key", "model", "status", "since", "limit")
_USAGE = ("tenant", "key", "model", "from", "to", "granularity", "format")
_SUMS = ("tenant", "key", "model", "from", "to", "by", "granularity")
_COSTS = ("from", "to", "by")
_RETRY_S = 2.0


class ConsoleData:
    """The request handlers of the console's additional data."""

    def __init__(self, database: Database, telemetry: TelemetryReader) -> None:
        self._database = database
        self._telemetry = telemetry

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        found: list[AdminRoute] = []
        for path, handler, action, query in (
            ("overview", self.overview, _PLATFORM, ()),
            ("requests", self.requests, _READ, _REQUESTS),
            ("requests/{request_id:[^/]+}", self.request, _READ, ("tenant",)),
            ("usage", self.usage, _READ, _USAGE),
            ("usage/sums", self.sums, _READ, _SUMS),
            ("costs", self.costs, _PLATFORM, _COSTS),
        ):
            told = describe.operation("For the console", query=query)
            found.append(
                AdminRoute("GET", f"/console/data/{path}", handler, action, "console", told)
            )
        return found

    async def overview(self, _: web.Request) -> web.Response:
        """Return the state of the platform.

        Without telemetry `slo` is null, and `missing` has the reason.
        """
        found: dict[str, Any] = await self._database.run(overview)
        try:
            answer = await self._telemetry.get("/v1/slo", {})
            told = {"slo": json.loads(answer.body) if answer.status == 200 else None, "missing": ""}
        except FeedDownError as error:
            told = {"slo": None, "missing": str(error)}
        return _json(json.dumps(found | told).encode())

    async def requests(self, request: web.Request) -> web.Response:
        """Return the newest requests from telemetry."""
        return await self._relay("/v1/requests", _scoped(request))

    async def request(self, request: web.Request) -> web.Response:
        """Return all details of one request."""
        request_id = request.match_info["request_id"]
        if not is_request_id(request_id):
            message = "request_id: 1 to 128 of A-Z a-z 0-9 . _ : - are expected"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="request_id")
        return await self._relay(f"/v1/requests/{quote(request_id, safe='')}", _scoped(request))

    async def usage(self, request: web.Request) -> web.Response:
        """Return usage from the ledger, as JSON or as a file."""
        return await self._relay("/v1/usage", _scoped(request))

    async def sums(self, request: web.Request) -> web.Response:
        """Return the usage of whole days, grouped by one column. Telemetry adds usage in rounds."""
        return await self._relay("/v1/usage/sums", _scoped(request))

    async def costs(self, request: web.Request) -> web.Response:
        """Return the costs, summed by payer."""
        return await self._relay("/v1/costs", {**request.query, "sums": "true"})

    async def _relay(self, path: str, query: dict[str, str]) -> web.Response:
        try:
            answer = await self._telemetry.get(path, query)
        except FeedDownError as error:
            raise PlatformError(
                ErrorCode.UNAVAILABLE, str(error), retry_after_s=_RETRY_S
            ) from error
        if answer.status == 200:
            return _answer(answer, query.get("format", ""))
        code = ErrorCode.NOT_FOUND if answer.status == 404 else ErrorCode.INVALID_REQUEST
        raise BadRequestError(code, _detail(answer))


def _scoped(request: web.Request) -> dict[str, str]:
    """Return the query, restricted to the caller's tenant. The id of another tenant is a 404."""
    tenant = own_tenant(request)
    return dict(request.query) | ({"tenant": tenant} if tenant else {})


def _answer(answer: TelemetryAnswer, file_format: str) -> web.Response:
    if file_format in {"", "json"}:
        return _json(answer.body)
    name = f'attachment; filename="usage.{"csv" if file_format == "csv" else "parquet"}"'
    headers = {"Cache-Control": "no-store", "Content-Disposition": name}
    return web.Response(body=answer.body, content_type=answer.content_type, headers=headers)


def _json(body: bytes) -> web.Response:
    headers = {"Cache-Control": "no-store"}
    return web.Response(body=body, content_type="application/json", headers=headers)


def _detail(answer: TelemetryAnswer) -> str:
    try:
        return str(json.loads(answer.body)["detail"])
    except (ValueError, KeyError, TypeError):
        return "telemetry refuses the query"
