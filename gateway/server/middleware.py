"""What all endpoints share: request identity, authentication, and one shape for every error."""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from aiohttp import web

from gateway.directory import Directory, Principal
from gateway.limits.limiter import LimitExceededError
from gateway.metrics import GatewayMetrics
from gateway.server.errors import body_of, headers_of
from sluice.errors import BadRequestError, ErrorCode, PlatformError

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})")

# HTTP errors that aiohttp itself raises; anything else of the 4xx family is an invalid request.
_HTTP_CODES = {
    404: ErrorCode.NOT_FOUND,
    405: ErrorCode.METHOD_NOT_ALLOWED,
    413: ErrorCode.REQUEST_TOO_LARGE,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """The names of one request.

    Attributes:
        uid: Ours, 32 random hex digits; other ids are made of it.
        request_id: The caller's `x-request-id` when it is sane, else ours.
        trace_id: 32 hex digits, the caller's or new.
        traceparent: W3C trace context to pass on.
    """

    uid: str
    request_id: str
    trace_id: str
    traceparent: str


_IDENTITY = web.RequestKey("identity", Identity)
_OUTCOME = web.RequestKey("outcome", str)


def identity_of(request: web.Request) -> Identity:
    """Return the names that the middleware has given to a request."""
    return request[_IDENTITY]


def note_outcome(request: web.Request, outcome: str) -> None:
    """Say how a request ended, for log and metrics; by default its HTTP status says it."""
    request[_OUTCOME] = outcome


def authenticate(directory: Directory, request: web.Request) -> Principal:
    """Return the caller; PlatformError 401 without a good key."""
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise PlatformError(
            ErrorCode.INVALID_API_KEY,
            "You didn't provide an API key. Send it in the header 'Authorization: Bearer <key>'.",
        )
    return directory.authenticate(secret, time.time_ns() // 1_000_000)


def _new_identity(request: web.Request) -> Identity:
    uid = secrets.token_hex(16)
    given = request.headers.get("x-request-id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uid}"
    context = _TRACEPARENT.fullmatch(request.headers.get("traceparent", ""))
    trace_id, flags = (context[1], context[2]) if context else (uid, "01")
    return Identity(uid, request_id, trace_id, f"00-{trace_id}-{uid[16:]}-{flags}")


def error_response(error: PlatformError) -> web.Response:
    """Return the answer for an error."""
    headers = headers_of(error)
    if isinstance(error, LimitExceededError):
        headers |= error.headers
    return web.Response(
        body=body_of(error), status=error.status, headers=headers, content_type="application/json"
    )


def _platform_error(error: web.HTTPException) -> PlatformError:
    code = _HTTP_CODES.get(error.status, ErrorCode.INVALID_REQUEST)
    if error.status >= 500:
        code = ErrorCode.INTERNAL
    texts = {
        404: "Unknown request URL. See the documentation for the endpoints of this server.",
        405: "This method is not allowed for this URL.",
        413: "The request body is larger than the 4 MiB that this server takes.",
    }
    return PlatformError(code, texts.get(error.status, error.reason))


class Envelope:
    """The outermost middleware: identity, errors, counters and the access log."""

    def __init__(self, metrics: GatewayMetrics, *, log_every: int) -> None:
        """Prepare; of successful requests, one in `log_every` is logged, errors always."""
        self._metrics = metrics
        self._log_every = log_every
        self._until_log = 1
        self._counters: dict[tuple[str, int, str], Callable[[], None]] = {}

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle one request."""
        started_at_s = time.monotonic()
        identity = request[_IDENTITY] = _new_identity(request)
        try:
            response = await self._answer(request, handler)
        except (asyncio.CancelledError, ConnectionError):
            self._count(request, 499, ErrorCode.CLIENT_CLOSED, started_at_s)
            raise
        if not response.prepared:
            response.headers["x-request-id"] = identity.request_id
        outcome = request.get(_OUTCOME) or ("ok" if response.status < 400 else "error")
        self._count(request, response.status, outcome, started_at_s)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except PlatformError as error:
            failure = error
        except web.HTTPException as error:
            failure = _platform_error(error)
            if "Allow" in error.headers:
                note_outcome(request, failure.code)
                response = error_response(failure)
                response.headers["Allow"] = error.headers["Allow"]
                return response
        except web.RequestPayloadError as error:
            failure = BadRequestError(ErrorCode.INVALID_REQUEST, f"The body is broken: {error}")
        except Exception:  # the outermost place: no trace reaches the client, no worker is lost
            if request.transport is None or request.transport.is_closing():
                raise
            log.exception("request_failed", request_id=identity_of(request).request_id)
            failure = PlatformError(
                ErrorCode.INTERNAL, "The server had an error while processing your request."
            )
        note_outcome(request, failure.code)
        return error_response(failure)

    def _count(self, request: web.Request, status: int, outcome: str, started_at_s: float) -> None:
        resource = request.match_info.route.resource
        endpoint = resource.canonical if resource is not None else "other"
        key = (endpoint, status, outcome)
        count = self._counters.get(key)
        if count is None:
            count = self._metrics.requests.labels(endpoint, str(status), outcome).inc
            self._counters[key] = count
        count()
        is_error = status >= 400 or outcome in ErrorCode.__members__.values()
        self._until_log -= 1
        if is_error or not self._until_log:
            self._until_log = self._until_log or self._log_every
            log.info(
                "request_ended",
                request_id=identity_of(request).request_id,
                endpoint=endpoint,
                status=status,
                outcome=outcome,
                total_ms=round((time.monotonic() - started_at_s) * 1000, 1),
            )
