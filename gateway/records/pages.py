"""Query parameters and JSON of the API's paged lists."""

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from gateway.bodies.mistakes import bad_value
from gateway.bodies.responses import INCLUDABLE

_LIMIT, _LIMIT_MAX = 20, 100
# Official SDKs append brackets to the name of a list.
INCLUDE = ("include", "include[]")


def page_of(request: web.Request, *also: str, default_order: str = "desc") -> tuple[int, bool, str]:
    """Return the page size, whether the order is ascending, and the id after which the page begins.

    Args:
        request: The request for a list.
        *also: Further parameters that the request may have.
        default_order: Order if the request names none, "asc" or "desc".

    Raises:
        BadRequestError: A parameter is unknown or has an invalid value.
    """
    query = request.query
    if unknown := query.keys() - {"limit", "order", "after", *also}:
        raise bad_value(min(unknown), "this parameter is unknown; leave it out")
    text = query.get("limit", str(_LIMIT))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:4]) <= _LIMIT_MAX:
        raise bad_value("limit", f"send a number from 1 to {_LIMIT_MAX}")
    order = query.get("order", default_order)
    if order not in ("asc", "desc"):
        raise bad_value("order", "send 'asc' or 'desc'")
    return int(text), order == "asc", query.get("after", "")


def check_included(request: web.Request) -> None:
    """Raise BadRequestError unless the query's `include` names only what is always returned.

    Log probabilities are part of an answer that was created with them.
    """
    for name in INCLUDE:
        for value in request.query.getall(name, ()):
            if value not in INCLUDABLE:
                raise bad_value("include", f"send {' or '.join(INCLUDABLE)}")


def listed(page: Sequence[dict[str, Any]], *, has_more: bool) -> bytes:
    """Return a page of a list as JSON."""
    told = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }
    return orjson.dumps(told)
