"""Sign-in to the console and sign-out. An admin key is exchanged for a short session in a cookie.

The key is sent once, in a header, and is stored nowhere. Only a hash of the cookie is stored.
"""

from typing import Annotated, Any

from aiohttp import web
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access import session_repository
from control_plane.access.roles import Actor
from control_plane.access.sessions import (
    COOKIE,
    ConsoleSession,
    csrf_token,
    new_session_secret,
    secret_hash,
)
from control_plane.audit import repository as audit
from control_plane.audit.model import recordable
from control_plane.audit.repository import AuditRow
from control_plane.database import Database
from control_plane.fields import AdminBody, Text
from control_plane.http.access import Identities
from control_plane.http.bodies import read_body, refuse_unknown_query
from control_plane.http.routes import REQUEST_ID, AdminRoute
from sluice.errors import ErrorCode, PlatformError
from sluice.ids import new_id
from sluice.limits import METERED_NAMES

_KIND = "sessions"
_PATH, _ALL = "/console/session", "/console/sessions"
_HEADERS = {"Cache-Control": "no-store"}


class SignInBody(AdminBody):
    """The name of the person who signs in, for the audit log.

    Several people may share an admin key.
    """

    name: Annotated[Text, Field(max_length=64)] = ""


class SessionRoutes:
    """The request handlers of the caller's own sessions."""

    def __init__(
        self,
        database: Database,
        identities: Identities,
        life_s: float,
        *,
        has_provider: bool = False,
    ) -> None:
        """Create the handlers.

        Args:
            database: Database of sessions.
            identities: Identifies callers by key or session.
            life_s: Longest duration of a session in seconds.
            has_provider: Whether people may also sign in by an OpenID provider.
        """
        self._database = database
        self._identities = identities
        self._life_s = life_s
        self._has_provider = has_provider

    def routes(self) -> list[AdminRoute]:
        """Return the routes, whose handlers check the key or the session themselves."""
        return [
            AdminRoute("POST", _PATH, self.sign_in, None),
            AdminRoute("GET", _PATH, self.show, None),
            AdminRoute("DELETE", _PATH, self.sign_out, None),
            AdminRoute("DELETE", _ALL, self.sign_out_everywhere, None),
        ]

    async def sign_in(self, request: web.Request) -> web.Response:
        """Begin a session (201) for the owner of an admin key.

        The session of an older cookie ends.
        """
        refuse_unknown_query(request, ())  # a key in the URL would be stored in logs of proxies
        actor, key_sha256 = await self._identities.of_key(request)
        name = (await read_body(request, SignInBody)).name or actor.name
        actor = Actor(actor.id, actor.role, actor.tenant_id, name)
        return await self.begin(request, actor, key_sha256)

    async def begin(
        self, request: web.Request, actor: Actor, key_sha256: bytes | None
    ) -> web.Response:
        """Begin a session and send its cookie. An id from the browser is never reused."""
        secret, session_id = new_session_secret(), new_id("session")
        older = secret_hash(request.cookies.get(COOKIE, ""))

        async def work(connection: AsyncConnection) -> ConsoleSession:
            await session_repository.end(connection, older)
            hashes = (secret_hash(secret), key_sha256)
            begun = await session_repository.begin(
                connection, session_id, actor, hashes, self._life_s
            )
            await audit.record(connection, [_row(request, actor, "create", session_id)])
            return begun

        begun = await self._database.run(work)
        answer = web.json_response(_shown(begun, secret), status=201, headers=_HEADERS)
        self._give(request, answer, secret)
        return answer

    async def show(self, request: web.Request) -> web.Response:
        """Return the caller's session.

        Without a session the actor is null, which is not an error.
        """
        refuse_unknown_query(request, ())
        found = await self._identities.session(request)
        no_session: dict[str, Any] = {"actor": None}
        if self._has_provider:
            no_session["has_provider"] = True
        body = no_session if found is None else _shown(found, request.cookies[COOKIE])
        return web.json_response(body, headers=_HEADERS)

    async def sign_out(self, request: web.Request) -> web.Response:
        """End the caller's session (204)."""
        return await self._end(request, is_everywhere=False)

    async def sign_out_everywhere(self, request: web.Request) -> web.Response:
        """End all sessions of the caller (204), in all browsers."""
        return await self._end(request, is_everywhere=True)

    async def _end(self, request: web.Request, *, is_everywhere: bool) -> web.Response:
        found = await self._identities.session(request)
        if found is None:
            raise PlatformError(
                ErrorCode.INVALID_API_KEY, "there is no session, or it has ended; sign in again"
            )

        async def work(connection: AsyncConnection) -> None:
            if is_everywhere:
                await session_repository.end_all(connection, found.actor.id)
            else:
                await session_repository.end(connection, secret_hash(request.cookies[COOKIE]))
            object_id = found.actor.id if is_everywhere else found.id
            await audit.record(connection, [_row(request, found.actor, "revoke", object_id)])

        await self._database.run(work)
        answer = web.Response(status=204, headers=_HEADERS)
        answer.set_cookie(COOKIE, "", max_age=0, path="", httponly=True, samesite="Strict")
        return answer

    def _give(self, request: web.Request, answer: web.Response, secret: str) -> None:
        """Set the session cookie for /console, hidden from scripts, and secure if TLS is used.

        No path is set. Browsers then use the directory of the request's URL, which a proxy may have
        changed.
        """
        answer.set_cookie(
            COOKIE,
            secret,
            max_age=round(self._life_s),
            path="",
            httponly=True,
            samesite="Strict",
            secure=is_over_tls(request),
        )


def is_over_tls(request: web.Request) -> bool:
    """Return whether the browser uses TLS, to this server or to a proxy that reports it."""
    return request.secure or request.headers.get("X-Forwarded-Proto") == "https"


def _shown(session: ConsoleSession, secret: str) -> dict[str, Any]:
    actor = session.actor
    return {
        "actor": actor.id,
        "role": str(actor.role),
        "tenant_id": actor.tenant_id,
        "name": actor.name,
        "expires_at": session.expires_at.isoformat(),
        "csrf": csrf_token(secret),
        "limits": METERED_NAMES,  # kinds of limits that a key may have
    }


def _row(request: web.Request, actor: Actor, verb: str, object_id: str) -> AuditRow:
    return AuditRow(
        id=new_id("audit"),
        actor_id=actor.id,
        actor_role=actor.role,
        action=verb,
        kind=_KIND,
        object_id=object_id,
        outcome="done",
        detail="",
        before=None,
        after=None,
        request_id=request[REQUEST_ID],
        idempotency_key="",
        actor_name=recordable(actor.name),
    )
