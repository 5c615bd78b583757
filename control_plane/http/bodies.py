"""Parsing of JSON bodies, queries, ids and times of requests. An error names the first mistake."""

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, TypeVar, cast

from aiohttp import web
from pydantic import ValidationError

from control_plane.fields import AdminBody, checked_id
from control_plane.http.routes import REPEATED, ROUTE
from control_plane.percent import OF_CLIENT
from sluice.errors import BadRequestError, ErrorCode

BODY_BYTES_MAX = 256 * 1024
_BODY_TIMEOUT_S = 10.0
_MISTAKES = {
    "extra_forbidden": "there is no such field; /openapi.json lists the fields",
    "missing": "this field is needed",
}

Parsed = TypeVar("Parsed", bound=AdminBody)


async def read_body(request: web.Request, kind: type[Parsed]) -> Parsed:
    """Return the validated body. An empty body counts as an empty object.

    Read-only fields that the body repeats from an answer are stored in the request as `REPEATED`.
    The write later checks that they are unchanged.

    Raises:
        BadRequestError: The body is not valid. The message names the first mistake and its field.
    """
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            payload = await request.read() or b"{}"
    except TimeoutError:
        message = f"the body did not arrive within {_BODY_TIMEOUT_S:g} s; send it again"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message) from None
    read_only = request[ROUTE].read_only if ROUTE in request else frozenset[str]()
    payload, request[REPEATED] = _without(payload, read_only)
    try:
        return kind.model_validate_json(payload, context=OF_CLIENT)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        text = _MISTAKES.get(first["type"], first["msg"]).removeprefix("Value error, ")
        message = f"{field}: {text}" if field else text
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=field or None) from None


def check_repeated(request: web.Request, shown: Mapping[str, Any] | None) -> None:
    """Check that the read-only fields in a body have their present values.

    Args:
        request: The request whose body was read.
        shown: Object in the form of a GET, or None if the object does not exist. Without an object,
            only values from the path may be repeated.

    Raises:
        BadRequestError: A field differs from its present value.
    """
    known = request.match_info if shown is None else shown
    for name, value in request.get(REPEATED, {}).items():
        if name not in known or known[name] != value:
            message = f"{name}: it is read-only; leave it out, or send it as GET shows it"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=name)


def _without(payload: bytes, names: Collection[str]) -> tuple[bytes, dict[str, Any]]:
    """Return a body without the given fields, and the values of these fields."""
    try:
        found = json.loads(payload) if names else None
    except ValueError:
        found = None  # not JSON, which the later validation reports
    if not isinstance(found, dict):
        return payload, {}
    fields = cast("dict[str, Any]", found)
    taken = {name: fields.pop(name) for name in sorted(fields.keys() & set(names))}
    return (json.dumps(fields).encode() if taken else payload), taken


def refuse_unknown_query(request: web.Request, known: Collection[str]) -> None:
    """Raise BadRequestError if a query parameter is unknown.

    Otherwise a misspelt filter would return all objects.
    """
    unknown = min(request.query.keys() - set(known), default=None)
    if unknown is not None:
        takes = f"takes {', '.join(sorted(known))}" if known else "takes none"
        message = f"there is no query parameter {unknown[:64]!r}: this {takes}"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=unknown[:64])


def path_id(
    request: web.Request, name: str = "id", check: Callable[[str], str] = checked_id
) -> str:
    """Return an id from the path. Raises BadRequestError if the id is not valid."""
    value = request.match_info[name]
    try:
        return check(value)
    except ValueError as error:
        raise BadRequestError(ErrorCode.INVALID_REQUEST, f"{name}: {error}", param=name) from None


def moment(text: str, name: str) -> datetime:
    """Return the time in an ISO 8601 text with a time zone.

    Raises:
        BadRequestError: The text is not valid.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        message = f"{name}: a moment like 2030-12-31T23:59:59Z is expected"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=name)
    return found
