"""Code that all endpoints share, for request ids, authentication and the answers to errors."""

import asyncio
import time

import structlog
from aiohttp import HttpVersion11, hdrs, web

from gateway.directory import Directory, Principal
from gateway.server.answer_counts import AnswerCounts
from gateway.server.bounds import too_many_connections
from gateway.server.cors import Cors
from gateway.server.errors import HttpError, body_of, headers_of
from gateway.server.identity import identity_of, set_identity
from gateway.server.protocol import UNKNOWN_VERSION
from gateway.server.routes import ErrorForm, GatewayRoute, Routes
from sluice.errors import ErrorCode, PlatformError, RejectedError

log = structlog.get_logger(__name__)

_OUTCOME = web.RequestKey("outcome", str)
_PRINCIPAL = web.RequestKey("principal", Principal)
_UNKNOWN = GatewayRoute("other", is_open_when_full=False)


def note_outcome(request: web.Request, outcome: str) -> None:
    """Set the outcome of a request for log and metrics. The default is `ok` or `error`."""
    request[_OUTCOME] = outcome


def outcome_of(request: web.Request, status: int) -> str:
    """Return the outcome that was set. The default is `ok` below status 400, else `error`."""
    return request.get(_OUTCOME) or ("ok" if status < 400 else "error")


def give_principal(request: web.Request, principal: Principal) -> None:
    """Set the caller of a request that this process itself has created."""
    request[_PRINCIPAL] = principal


def authenticate(directory: Directory, request: web.Request) -> Principal:
    """Return the caller.

    Raises PlatformError 401 without a valid key, and 503 before the first snapshot.
    """
    if (ours := request.get(_PRINCIPAL)) is not None:
        return ours
    scheme, _, secret = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if not scheme:  # clients of Azure and Anthropic send the key in another header
        scheme = "bearer"
        secret = request.headers.get("api-key") or request.headers.get("x-api-key") or ""
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise PlatformError(
            ErrorCode.INVALID_API_KEY,
            "You didn't provide an API key. Send it in the header 'Authorization: Bearer <key>'.",
        )
    if directory.is_blank:
        text = "The server has just started and knows no keys yet; try again shortly."
        raise RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=1.0)
    return directory.authenticate(secret, time.time_ns() // 1_000_000)


def error_response(error: PlatformError, form: ErrorForm = body_of) -> web.Response:
    """Return the answer for an error. `form` writes its body."""
    response = web.Response(
        body=form(error),
        status=error.status,
        headers=headers_of(error),
        content_type="application/json",
    )
    if isinstance(error, HttpError) and error.ends_connection:
        response.force_close()
    return response


class Envelope:
    """Answers every request by its handler or with an error, and counts and logs it."""

    def __init__(
        self,
        routes: Routes,
        counts: AnswerCounts,
        *,
        trace_share: float = 1.0,
        cors: Cors | None = None,
    ) -> None:
        """All requests of a server pass through this object.

        Args:
            routes: Handlers by path and method.
            counts: Counts and logs ended requests.
            trace_share: Share of the traces beginning here that are sampled.
            cors: Origins whose pages may call the API, or None for no origin.
        """
        self._routes = routes
        self._cors = cors or Cors()
        self._counts = counts
        self._trace_share = trace_share

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        started_at_s = time.monotonic()
        identity = set_identity(request, self._trace_share, self._cors)
        route = _UNKNOWN
        try:
            try:
                route = self._route(request)
                response = self._cors.preflight(request)
                if response is None:
                    response = await route.handler(request.method, request.path)(request)
            except Exception as error:  # noqa: BLE001 - an error must not end the worker
                response = self._refusal(request, error, route.error_form)
        except (asyncio.CancelledError, ConnectionError):
            code = ErrorCode.CLIENT_CLOSED
            self._counts.note(
                route.name, code.policy.status, code, identity.request_id, started_at_s
            )
            raise
        if not response.prepared:
            response.headers.update(identity_of(request).headers)
        outcome = outcome_of(request, response.status)
        self._counts.note(route.name, response.status, outcome, identity.request_id, started_at_s)
        return response

    def note_malformed(self, error: PlatformError, request_id: str) -> None:
        """Count and log the answer to a malformed request."""
        self._counts.note("malformed", error.status, error.code, request_id, time.monotonic())

    def _route(self, request: web.Request) -> GatewayRoute:
        if request.version != HttpVersion11 and UNKNOWN_VERSION in request:
            raise HttpError(505, "This server speaks HTTP/1.0 and HTTP/1.1.")
        route = self._routes.find(request.path)
        if _is_surplus(request) and not route.is_open_when_full:
            raise too_many_connections()
        return route

    def _refusal(
        self, request: web.Request, error: Exception, form: ErrorForm
    ) -> web.StreamResponse:
        """Return the answer to a failure, or raise ConnectionError if no answer can be sent."""
        if isinstance(error, ConnectionError):
            raise error
        if isinstance(error, PlatformError):
            failure = error
        elif isinstance(error, web.RequestPayloadError):
            failure = HttpError(400, "The request body is broken; send it again.")
        else:  # A bug. The stack trace is logged, and the client receives a plain 500.
            log.error("request_failed", request_id=identity_of(request).request_id, exc_info=error)
            failure = PlatformError(
                ErrorCode.INTERNAL,
                "The server had an error while processing your request; try again.",
            )
        note_outcome(request, failure.code)
        if request.writer.output_size > 0 or request.transport is None:
            raise ConnectionResetError("the response has begun") from error
        response = error_response(failure, form)
        if _is_surplus(request):
            response.force_close()
        return response


def _is_surplus(request: web.Request) -> bool:
    return getattr(request.protocol, "is_surplus", False)
