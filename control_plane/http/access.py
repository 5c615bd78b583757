"""Who asks, and whether they may: admin keys, and the bootstrap key of the settings."""

import hashlib
import hmac

import structlog
from aiohttp import web
from aiohttp.hdrs import METH_ANY
from aiohttp.typedefs import Handler, Middleware
from sqlalchemy.exc import DBAPIError

from control_plane.access.keys import ADMIN_KEY_PREFIX
from control_plane.access.repository import find_actor
from control_plane.access.roles import Actor, Reach, Role
from control_plane.database import Database
from control_plane.http.bodies import refuse_unknown_query
from control_plane.http.routes import ACTOR, ROUTE, AdminRoute
from control_plane.http.writes import RECORDED, Writes, forbidden
from sluice.errors import ErrorCode, PlatformError

log = structlog.get_logger(__name__)

BOOTSTRAP = Actor("bootstrap", Role.ADMIN)


def guard(
    database: Database, bootstrap_sha256: str, routes: dict[web.AbstractRoute, AdminRoute]
) -> Middleware:
    """Return a middleware that lets in who holds a key that may do what a route declares.

    What is at no declared route is there for nobody. Writes that are refused are recorded.

    Args:
        database: Where the keys are.
        bootstrap_sha256: SHA-256 (hex) of a key that is always an admin's.
        routes: What the routes declare.
    """
    writes = Writes(database)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = routes.get(request.match_info.route)
        if route is not None and route.action is None:
            return await handler(request)
        request[ACTOR] = actor = await _identify(database, bootstrap_sha256, request)
        if route is None:
            match = request.match_info
            if match.http_exception is None and match.route.method != METH_ANY:
                raise PlatformError(ErrorCode.NOT_FOUND, "nobody may use this: it has no action")
            return await handler(request)
        request[ROUTE] = route
        if not (route.is_write or route.is_noted):
            return await _allowed(actor, route, request, handler)
        try:
            answer = await _allowed(actor, route, request, handler)
        except (PlatformError, web.HTTPException) as error:
            await _record(writes, request, error)
            raise
        is_recorded = request.get(RECORDED, False) or not route.is_audited
        assert is_recorded, f"{route.method} {route.public_path} left no audit row"
        return answer

    return check


async def _allowed(
    actor: Actor, route: AdminRoute, request: web.Request, handler: Handler
) -> web.StreamResponse:
    assert route.action is not None, "open routes are not checked"
    if actor.reach(route.action) is Reach.NOTHING:
        raise forbidden(actor, route)
    refuse_unknown_query(request, route.query)
    return await handler(request)


async def _identify(database: Database, bootstrap_sha256: str, request: web.Request) -> Actor:
    """Return who asks; hashes are compared in constant time."""
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    key = text.strip()
    given = hashlib.sha256(key.encode("utf-8", "surrogateescape"))
    if scheme.lower() == "bearer":
        if hmac.compare_digest(given.hexdigest(), bootstrap_sha256):
            return BOOTSTRAP
        # What strangers make up costs the database nothing, unless they know what keys look like.
        if key.startswith(ADMIN_KEY_PREFIX):
            found = await database.run(lambda connection: find_actor(connection, given.digest()))
            if found is not None:
                return found
    raise PlatformError(
        ErrorCode.INVALID_API_KEY, "send an admin key as `Authorization: Bearer <key>`"
    )


async def _record(
    writes: Writes, request: web.Request, error: PlatformError | web.HTTPException
) -> None:
    """Record a refusal; the caller hears of the refusal, whatever becomes of its record."""
    if isinstance(error, web.HTTPException):
        code = ErrorCode.REQUEST_TOO_LARGE if error.status == 413 else ErrorCode.INVALID_REQUEST
        error = PlatformError(code, error.reason)
    if error.code is ErrorCode.UNAVAILABLE:
        return  # the place for records is what is not available
    try:
        await writes.refused(request, error)
    except (PlatformError, DBAPIError) as failure:
        log.warning("refusal_not_recorded", path=request.path, error=str(failure))
