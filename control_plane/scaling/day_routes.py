"""Serves what happened to a pool minute by minute, for the picture of a day."""

from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import path_id
from control_plane.http.resources import shown
from control_plane.http.routes import AdminRoute
from control_plane.scaling import repository
from control_plane.scaling.minutes import MINUTE_S, NUMBERS, read_minutes
from control_plane.scaling.queries import ONE, require_pool, span_of
from control_plane.scaling.traffic import read_traffic
from control_plane.telemetry_client import FeedDownError
from control_plane.telemetry_reader import NO_TELEMETRY, TelemetryReader

_LIST: dict[str, Any] = {"type": "array", "items": describe.nullable(describe.NUMBER)}
_MOMENT: dict[str, Any] = describe.TEXT | {"format": "date-time"}
_SHOWN: dict[str, Any] = {
    "from": _MOMENT,
    "to": _MOMENT,
    **dict.fromkeys(NUMBERS, _LIST),
    "violated": {"type": "array", "items": describe.BOOLEAN},  # empty if `missing` has a reason
    "requests": {"type": "array", "items": describe.INTEGER},
    "missing": describe.TEXT,
}


class DayRoutes:
    """The request handler of the minutes of a pool, which changes nothing."""

    def __init__(self, database: Database, telemetry: TelemetryReader = NO_TELEMETRY) -> None:
        """Create the handler.

        Args:
            database: Database of the pools.
            telemetry: Client of the telemetry service, for violated minutes.
        """
        self._database = database
        self._telemetry = telemetry

    def routes(self) -> list[AdminRoute]:
        """Return the route."""
        told = describe.operation(
            "Show the replicas, the demand and the violated minutes of a pool, minute by minute",
            answer=describe.shown(("pool_id", *_SHOWN), types=_SHOWN),
            query=("from", "to"),
        )
        path, read = f"{ONE}/minutes", Action.READ_PLATFORM
        return [AdminRoute("GET", path, self.minutes, read, "scaling", told)]

    async def minutes(self, request: web.Request) -> web.Response:
        """Return one list per number, with null for minutes without a round of scaling.

        Without telemetry `violated` and `requests` are empty, and `missing` has the reason.
        """
        key, span = path_id(request), span_of(request, datetime.now(UTC))

        async def work(
            connection: AsyncConnection,
        ) -> tuple[dict[str, list[float | None]], dict[str, int]]:
            await require_pool(connection, key)
            numbers = await read_minutes(connection, key, span)
            return numbers, await repository.objectives_ms(connection)

        numbers, objectives_ms = await self._database.run(work)
        body: dict[str, Any] = {
            "pool_id": key,
            "from": span[0].isoformat(),
            "to": span[1].isoformat(),
            **numbers,
        }
        try:
            found = await read_traffic(self._telemetry, key, span, MINUTE_S, objectives_ms)
            body |= {"violated": found.violated, "requests": found.requests, "missing": ""}
        except FeedDownError as error:
            body |= {"violated": [], "requests": [], "missing": str(error)}
        return shown(request, body)
