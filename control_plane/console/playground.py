"""The playground's proxy to a gateway, which forwards a request with the key of its user.

The page sends requests only to its own origin. So its policy is `connect-src 'self'`, and gateways
need not permit other origins. Each request has the key in a header, and the key is neither stored
nor logged.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import aiohttp
from aiohttp import web

from control_plane.access.keys import ADMIN_KEY_PREFIX, KEY_PREFIX
from control_plane.access.roles import Action
from control_plane.http.routes import AdminRoute
from sluice.certificates import http_options
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.identity import CertificateRole

KEY_HEADER = "x-sluice-key"
AT_ONCE_MAX = 20
_DIALECTS = "chat/completions|completions|responses|messages"
_PASSED = ("Content-Type", "X-Request-Id", "Retry-After")
_TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=5, sock_read=120)
_READ_TIMEOUT_S, _WRITE_TIMEOUT_S, _RETRY_S = 10.0, 10.0, 5.0
_KEY_CHARS_MAX = 256


class Playground:
    """Forwards requests of pages to a gateway, a bounded number at the same time."""

    def __init__(self, session: aiohttp.ClientSession, gateway_url: str) -> None:
        """Create the proxy. Without `gateway_url` every request is refused with the reason."""
        self._session = session
        self._url = gateway_url.rstrip("/")
        self._running = 0

    def routes(self) -> list[AdminRoute]:
        """Return the routes, which are not audited, because the gateway traces each request."""
        path = f"/console/data/play/{{dialect:{_DIALECTS}}}"
        read = Action.READ_TENANT
        return [AdminRoute("POST", path, self.play, read, "playground", is_audited=False)]

    async def play(self, request: web.Request) -> web.StreamResponse:
        """Forward a request, and stream the gateway's answer."""
        headers = {"Authorization": f"Bearer {_key(request)}", "Content-Type": "application/json"}
        if not self._url:
            message = (
                "CONTROL_PLANE__GATEWAY_URL is not set: set it to the gateway of the playground"
            )
            raise PlatformError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_S)
        if self._running >= AT_ONCE_MAX:
            message = f"{AT_ONCE_MAX} requests of playgrounds run already; try again shortly"
            raise PlatformError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_S)
        url = f"{self._url}/v1/{request.match_info['dialect']}"
        self._running += 1
        try:
            body = await _body(request)
            async with self._session.post(
                url, data=body, headers=headers, **http_options(CertificateRole.GATEWAY)
            ) as answer:
                return await _pass_on(request, answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = f"no gateway answers: {type(error).__name__}"
            raise PlatformError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_S) from None
        finally:
            self._running -= 1


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    kept = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
    response = web.StreamResponse(
        status=answer.status, headers=kept | {"Cache-Control": "no-store"}
    )
    await response.prepare(request)
    # If the page disconnects, the gateway's request ends. If the gateway fails, the page's answer
    # ends.
    with suppress(ConnectionError, TimeoutError, aiohttp.ClientError):
        async for piece in answer.content.iter_any():
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await response.write(piece)
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await response.write_eof()
    return response


def _key(request: web.Request) -> str:
    key = request.headers.get(KEY_HEADER, "").strip()
    if not key.startswith(KEY_PREFIX) or len(key) > _KEY_CHARS_MAX:
        message = f"send a tenant's key in {KEY_HEADER}: the playground has none of its own"
    elif key.startswith(ADMIN_KEY_PREFIX):
        message = "that is an admin key: send a tenant's key"
    else:
        return key
    raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=KEY_HEADER)


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        message = f"the body did not arrive within {_READ_TIMEOUT_S:g} s; send it again"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message) from None


@asynccontextmanager
async def open_playground(gateway_url: str) -> AsyncGenerator[Playground]:
    """Open a playground. The gateway need not run yet."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=False) as session:
        yield Playground(session, gateway_url)
