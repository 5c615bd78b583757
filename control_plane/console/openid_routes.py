"""Sign-in by an OpenID Connect provider, with an authorization code, PKCE, state and nonce."""

import base64
from urllib.parse import quote

import structlog
from aiohttp import web

from control_plane.access.openid import (
    OpenIdError,
    OpenIdSettings,
    actor_of,
    authorization_url,
    checked_claims,
    derived,
    is_fragment,
    is_state,
)
from control_plane.access.sessions import is_secret, new_session_secret
from control_plane.console.openid_provider import OpenIdProvider
from control_plane.console.session_routes import SessionRoutes, is_over_tls
from control_plane.http.bodies import refuse_unknown_query
from control_plane.http.routes import AdminRoute
from sluice.errors import BadRequestError, ErrorCode, PlatformError

log = structlog.get_logger(__name__)

_COOKIE = "sluice_login"
_LIFE_S = 600
_CODE_CHARS_MAX = 4096
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class OpenIdRoutes:
    """The request handlers of the sign-in. Without a provider these paths are a 404."""

    def __init__(
        self,
        sessions: SessionRoutes,
        settings: OpenIdSettings | None,
        provider: OpenIdProvider | None,
    ) -> None:
        self._sessions = sessions
        self._settings = settings
        self._provider = provider

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        return [
            AdminRoute("GET", "/console/login", self.login, None),
            AdminRoute("GET", "/console/callback", self.callback, None),
        ]

    async def login(self, request: web.Request) -> web.Response:
        """Redirect the browser to the provider. `to` is the console's fragment to open later."""
        settings, provider = self._parts()
        refuse_unknown_query(request, ("to",))
        to = request.query.get("to", "")
        if not is_fragment(to):
            message = "to: a place within the console is expected, as #/requests"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="to")
        secret = new_session_secret()
        try:
            endpoint = await provider.endpoint("authorization_endpoint")
        except OpenIdError as error:
            return _back(error)
        where = authorization_url(endpoint, settings, secret)
        answer = web.Response(status=303, headers=_HEADERS | {"Location": where})
        answer.set_cookie(
            _COOKIE,
            f"{secret}.{base64.urlsafe_b64encode(to.encode()).decode()}",
            max_age=_LIFE_S,
            path=settings.cookie_path,
            httponly=True,
            samesite="Lax",  # a strict cookie would be missing when the provider redirects back
            secure=is_over_tls(request),
        )
        return answer

    async def callback(self, request: web.Request) -> web.Response:
        """Begin a session for the identified person, and end the session of an older cookie."""
        settings, _ = self._parts()
        try:
            answer = await self._signed_in(request, settings)
        except OpenIdError as error:
            log.warning("sign_in_refused", code=error.code, reason=str(error))
            answer = _back(error)
        answer.del_cookie(_COOKIE, path=settings.cookie_path)
        return answer

    async def _signed_in(self, request: web.Request, settings: OpenIdSettings) -> web.Response:
        _, provider = self._parts()
        secret, _, place = request.cookies.get(_COOKIE, "").partition(".")
        if not is_secret(secret) or not is_state(request.query.get("state", ""), secret):
            raise OpenIdError("wrong", "this browser began no such sign-in; sign in again")
        if request.query.get("iss", settings.issuer) != settings.issuer:
            raise OpenIdError("wrong", "the answer is another provider's; sign in again")
        code = request.query.get("code", "")
        if not code or len(code) > _CODE_CHARS_MAX:
            raise OpenIdError("denied", f"no code: {request.query.get('error', '')[:100]}")
        token = await provider.id_token(code, secret)
        nonce = derived(secret, "nonce")
        claims = checked_claims(token, await provider.key_of(token), settings, nonce)
        begun = await self._sessions.begin(request, actor_of(claims, settings), None)
        answer = web.Response(status=303, headers=_HEADERS | {"Location": f"./{_place(place)}"})
        answer.cookies.update(begun.cookies)
        return answer

    def _parts(self) -> tuple[OpenIdSettings, OpenIdProvider]:
        if self._settings is None or self._provider is None:
            message = "sign-in by a provider is off: set CONTROL_PLANE__OPENID, or use an admin key"
            raise PlatformError(ErrorCode.NOT_FOUND, message)
        return self._settings, self._provider


def _place(encoded: str) -> str:
    """Return the console's fragment to open after sign-in, or an empty text if it is not valid.

    The value is read from the cookie, which a browser may forge.
    """
    try:
        text = base64.urlsafe_b64decode(encoded).decode()
    except ValueError:
        return ""
    return text if is_fragment(text) else ""


def _back(error: OpenIdError) -> web.Response:
    """Return the redirect to the sign-in form, with the reason of the failure."""
    where = f"./#/?problem={quote(error.code)}"
    return web.Response(status=303, headers=_HEADERS | {"Location": where})
