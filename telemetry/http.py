"""The HTTP side: queries for holders of the admin key, health, metrics."""

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sluice.errors import BadRequestError, ErrorCode, PlatformError, RejectedError
from telemetry.metrics import Metrics
from telemetry.queries import LIMIT_MAX, recent_requests
from telemetry.sink import Sink
from telemetry.store import STORE_ERRORS, Store

log = structlog.get_logger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_TENANT_CHARS_MAX = 256


class Api:
    """Routes of the service."""

    def __init__(self, store: Store, sink: Sink, metrics: Metrics, admin_key_sha256: str) -> None:
        self._store = store
        self._sink = sink
        self._metrics = metrics
        self._admin_key_sha256 = admin_key_sha256

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[_problems])
        app.router.add_get("/v1/requests", self._requests)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_text)
        return app

    async def _requests(self, request: web.Request) -> web.Response:
        self._check_key(request)
        limit = _limit(request.query.get("limit", "20"))
        tenant_id = request.query.get("tenant", "")
        if len(tenant_id) > _TENANT_CHARS_MAX:
            raise BadRequestError(ErrorCode.INVALID_REQUEST, "tenant is no id", param="tenant")
        try:
            rows = await recent_requests(self._store, limit=limit, tenant_id=tenant_id)
        except STORE_ERRORS as error:
            log.warning("query_failed", error=repr(error))
            raise RejectedError(
                ErrorCode.UNAVAILABLE, "the trace store does not answer", retry_after_s=2.0
            ) from error
        return web.json_response({"data": rows})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready = self._sink.is_ready
        return web.json_response(
            {"status": "ok" if ready else "waiting for broker or trace store"},
            status=200 if ready else 503,
        )

    async def _metrics_text(self, _request: web.Request) -> web.Response:
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _check_key(self, request: web.Request) -> None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        is_right = hmac.compare_digest(given, self._admin_key_sha256)
        if scheme.lower() != "bearer" or not is_right:
            raise BadRequestError(
                ErrorCode.INVALID_API_KEY, "send the admin key as `Authorization: Bearer <key>`"
            )


def _limit(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= LIMIT_MAX:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST, f"limit must be 1 to {LIMIT_MAX}", param="limit"
        )
    return int(text)


@web.middleware
async def _problems(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer failures as problem details (RFC 9457) with the platform's code."""
    try:
        return await handler(request)
    except PlatformError as error:
        response = web.json_response(
            {
                "type": "about:blank",
                "title": str(error.code),
                "status": error.status,
                "code": str(error.code),
                "detail": error.message,
            },
            status=error.status,
            content_type="application/problem+json",
        )
        if error.retry_after_s is not None:
            response.headers["Retry-After"] = str(round(error.retry_after_s))
        return response
