"""Path, query and errors that the routes of scaling have in common."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.http.bodies import moment
from control_plane.scaling.replay import REPLAY_HOURS_MAX
from control_plane.tables import pools
from sluice.errors import BadRequestError, ErrorCode, PlatformError

ONE = "/v1/pools/{id:[^/]+}/scaling"
PLAN_FIELDS = ("replicas_min", "replicas_max", "minute_worth")


def bounds_of(request: web.Request) -> dict[str, Any]:
    """Return the bounds in a query. The result has no value for a bound that the query lacks."""
    found: dict[str, Any] = {}
    for name in PLAN_FIELDS:
        text = request.query.get(name)
        if text is None:
            continue
        if not re.fullmatch(
            r"[0-9]{1,5}(\.[0-9]{1,6})?" if name == "minute_worth" else r"[0-9]{1,5}", text
        ):
            message = f"{name} must be a number from 0 to 99999"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=name)
        found[name] = float(text) if name == "minute_worth" else int(text)
    return found


def missing_pool(key: str) -> PlatformError:
    """Return the error for a pool that does not exist."""
    message = f"there is no pools/{key}: GET /v1/pools lists the pools"
    return PlatformError(ErrorCode.NOT_FOUND, message)


async def require_pool(connection: AsyncConnection, key: str) -> None:
    """Raise `missing_pool` if there is no pool with the id `key`."""
    if await connection.scalar(select(pools.c.id).where(pools.c.id == key)) is None:
        raise missing_pool(key)


def missing_bounds(key: str) -> PlatformError:
    """Return the error for a pool that is not scaled."""
    message = (
        f"pool {key} has no bounds, so it is not scaled: set them with PUT, or `sluice scaling set`"
    )
    return PlatformError(ErrorCode.NOT_FOUND, message)


def span_of(request: web.Request, now: datetime) -> tuple[datetime, datetime]:
    """Return the time range of a query in whole minutes, at most 48 hours before now.

    The default end is now, and the default length is a day. The minute of the end is included.

    Raises:
        BadRequestError: The range is empty, in the future, or longer than 48 hours.
    """
    query, step = request.query, timedelta(minutes=1)
    end = min(now, moment(query["to"], "to")) if "to" in query else now
    begin = moment(query["from"], "from") if "from" in query else end - timedelta(days=1)
    begin, end = (it.astimezone(UTC) for it in (begin, end + step - timedelta.resolution))
    begin, end = (it.replace(second=0, microsecond=0) for it in (begin, end))
    if not step <= end - begin <= timedelta(hours=REPLAY_HOURS_MAX) + step:
        message = f"from must be before to and now, at most {REPLAY_HOURS_MAX} hours before to"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="from")
    return begin, end
