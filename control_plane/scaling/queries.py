"""Path, query and error that the routes of scaling have in common."""

import re
from typing import Any

from aiohttp import web

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
            message = f"{name} must be a number from 0"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=name)
        found[name] = float(text) if name == "minute_worth" else int(text)
    return found


def missing_bounds(key: str) -> PlatformError:
    """Return the error for a pool that is not scaled."""
    message = (
        f"pool {key} has no bounds, so it is not scaled: set them with PUT, or `sluice scaling set`"
    )
    return PlatformError(ErrorCode.NOT_FOUND, message)
