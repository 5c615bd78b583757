"""Read-only REST of replica-hours by pool, node or hour."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.fleet import hours, hours_repository
from control_plane.http import describe
from control_plane.http.bodies import moment
from control_plane.http.resources import shown
from control_plane.http.routes import AdminRoute
from sluice.errors import BadRequestError, ErrorCode

PAGE_MAX = 10_000
_DEFAULT = timedelta(days=1)
_DAYS_MAX = {"pool": 400, "node": 400, "hour": 100}
_GROUPS = {"pool": "pool_id", "node": "node_id", "hour": "pool_id"}
# Width of a bucket that covers all times. The bucket ends after the year 2200.
_ONE_BUCKET_US = 10**16
_FIELDS = (
    *("id", "start", "name", "replica_hours", "running_hours", "reserved_hours"),
    *("accelerator_hours", "unassigned_hours"),
)


@dataclass(frozen=True, slots=True)
class _HoursQuery:
    """The parameters of a request. Times are Unix microseconds."""

    by: str
    span_us: tuple[int, int]
    limit: int
    after: str


class HoursRoutes:
    """The request handlers of replica-hours."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        row = describe.shown(_FIELDS)
        for name in _FIELDS[3:]:
            row["properties"][name] = {"type": "number"}
        summary = "List the hours of replicas, by pool, node, or hour and pool"
        told = describe.listing(summary, row, ("from", "to", "by"), limit_max=PAGE_MAX)
        path, action = "/v1/replica-hours", Action.READ_PLATFORM
        return [AdminRoute("GET", path, self.list, action, "replica-hours", told)]

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of rows.

        `?after=` with a page's last id and the same `from` requests the next page.
        """
        asked = _query(request, datetime.now(UTC))
        are_hours = asked.by == "hour"
        width_us = hours.HOUR_US if are_hours else _ONE_BUCKET_US

        async def work(connection: AsyncConnection) -> list[hours.Edges]:
            group = _GROUPS[asked.by]
            return await hours_repository.edges(connection, group, asked.span_us, width_us)

        edges = await self._database.run(work)
        found = hours.rows(edges, hours.buckets(asked.span_us, are_hours=are_hours))
        found = [row for row in found if row.id > asked.after]
        begin, end = map(_iso, asked.span_us)
        body = {
            "from": begin,
            "to": end,
            "by": asked.by,
            "data": [row.as_json(_iso(row.bucket_us)) for row in found[: asked.limit]],
            "has_more": len(found) > asked.limit,
        }
        return shown(request, body)


def _query(request: web.Request, now: datetime) -> _HoursQuery:
    query = request.query
    by = query.get("by", "pool")
    if by not in _GROUPS:
        message = f"by must be one of {', '.join(_GROUPS)}"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="by")
    end = min(now, moment(query["to"], "to")) if "to" in query else now
    begin = moment(query["from"], "from") if "from" in query else end - _DEFAULT
    if query.get("after") and "from" not in query:
        message = "after needs from, that of the first page: ids begin with it"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="from")
    if not timedelta() < end - begin <= timedelta(days=_DAYS_MAX[by]):
        message = f"from must be before to, and before now; by {by} at most {_DAYS_MAX[by]} days"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="from")
    text = query.get("limit", str(PAGE_MAX))
    if not (re.fullmatch(r"[0-9]{1,5}", text) and 1 <= int(text) <= PAGE_MAX):
        message = f"limit must be a number from 1 to {PAGE_MAX}"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="limit")
    return _HoursQuery(by, (_unix_us(begin), _unix_us(end)), int(text), query.get("after", ""))


def _unix_us(at: datetime) -> int:
    return (at - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def _iso(unix_us: int) -> str:
    at = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=unix_us)
    return at.isoformat().replace("+00:00", "Z")
