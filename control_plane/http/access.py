"""Identifies the actor of a request by admin key, by the bootstrap key, or by session."""

import hashlib
import hmac

import structlog
from aiohttp import web
from aiohttp.hdrs import METH_ANY
from aiohttp.typedefs import Handler, Middleware
from sqlalchemy.exc import DBAPIError

from control_plane.access import session_repository
from control_plane.access.keys import ADMIN_KEY_PREFIX
from control_plane.access.repository import find_actor
from control_plane.access.roles import Actor, Reach, Role
from control_plane.access.sessions import (
    COOKIE,
    CSRF_HEADER,
    ConsoleSession,
    is_csrf_token,
    is_secret,
    secret_hash,
)
from control_plane.database import Database
from control_plane.http.bodies import refuse_unknown_query
from control_plane.http.routes import ACTOR, ROUTE, AdminRoute
from control_plane.http.writes import RECORDED, Writes, forbidden
from sluice.errors import ErrorCode, PlatformError

log = structlog.get_logger(__name__)

BOOTSTRAP = Actor("bootstrap", Role.ADMIN)


class Identities:
    """Identifies callers by the key or the session of a request."""

    def __init__(self, database: Database, bootstrap_sha256: str) -> None:
        """Create the object that identifies callers.

        `bootstrap_sha256` is the hex hash of a key with role admin.
        """
        self._database = database
        self._bootstrap_sha256 = bootstrap_sha256

    async def of(self, request: web.Request) -> Actor:
        """Return the caller. If the request has a key and a session, the key is used.

        Raises:
            PlatformError: 401 if the request has no valid key or session, and 403 if a write by
                session lacks the required header.
        """
        if "Authorization" in request.headers:
            return (await self.of_key(request))[0]
        found = await self.session(request)
        if found is None:
            raise _stranger()
        return found.actor

    async def of_key(self, request: web.Request) -> tuple[Actor, bytes]:
        """Return the actor of a request's key, and the key's hash.

        Hashes are compared in constant time.

        Raises:
            PlatformError: 401 if the key is missing or not valid.
        """
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        key = text.strip()
        given = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        if scheme.lower() == "bearer":
            if bootstrap := self._of_bootstrap(given):
                return bootstrap, given
            # A key without the form of an admin key is refused without a database query.
            if key.startswith(ADMIN_KEY_PREFIX):
                found = await self._database.run(lambda connection: find_actor(connection, given))
                if found is not None:
                    return found, given
        raise _stranger()

    async def session(self, request: web.Request) -> ConsoleSession | None:
        """Return the session of a request's cookie, or None if there is no valid session.

        Raises:
            PlatformError: 403 if a write lacks the header that only the console's page can send.
        """
        secret = request.cookies.get(COOKIE, "")
        if not is_secret(secret):
            return None
        found = await self._database.run(
            lambda connection: session_repository.find(
                connection, secret_hash(secret), self._of_bootstrap
            )
        )
        is_safe = request.method in {"GET", "HEAD"}
        if found and not (is_safe or is_csrf_token(request.headers.get(CSRF_HEADER, ""), secret)):
            message = f"a session writes with the header {CSRF_HEADER}, from GET /console/session"
            raise PlatformError(ErrorCode.PERMISSION_DENIED, message)
        return found

    def _of_bootstrap(self, key_sha256: bytes) -> Actor | None:
        is_it = hmac.compare_digest(key_sha256.hex(), self._bootstrap_sha256)
        return BOOTSTRAP if is_it else None


def guard(
    database: Database, identities: Identities, routes: dict[web.AbstractRoute, AdminRoute]
) -> Middleware:
    """Return a middleware that admits callers whose key permits the action of the route.

    A path without a declared route is a 404 for every caller. Refused writes are recorded.

    Args:
        database: Database in which refused writes are recorded.
        identities: Identifies the actors of keys and sessions.
        routes: Declarations of the routes.
    """
    writes = Writes(database)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = routes.get(request.match_info.route)
        if route is not None and route.action is None:
            return await handler(request)
        request[ACTOR] = actor = await identities.of(request)
        if route is None:
            match = request.match_info
            if match.http_exception is None and match.route.method != METH_ANY:
                raise PlatformError(
                    ErrorCode.NOT_FOUND, "this route is not declared, so no role may use it"
                )
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


def _stranger() -> PlatformError:
    return PlatformError(
        ErrorCode.INVALID_API_KEY, "send an admin key as `Authorization: Bearer <key>`"
    )


async def _record(
    writes: Writes, request: web.Request, error: PlatformError | web.HTTPException
) -> None:
    """Record a refused write. The caller receives the refusal even if the recording fails."""
    if isinstance(error, web.HTTPException):
        code = ErrorCode.REQUEST_TOO_LARGE if error.status == 413 else ErrorCode.INVALID_REQUEST
        error = PlatformError(code, error.reason)
    if error.code is ErrorCode.UNAVAILABLE:
        return  # not recorded, because the database is down
    try:
        await writes.refused(request, error)
    except (PlatformError, DBAPIError) as failure:
        log.warning("refusal_not_recorded", path=request.path, error=str(failure))
