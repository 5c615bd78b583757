"""The HTTP side: queries for holders of the admin key, health, metrics."""

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sluice.errors import BadRequestError, ErrorCode, PlatformError, RejectedError
from telemetry import evidence
from telemetry.metrics import Metrics
from telemetry.progress import Progress
from telemetry.queries import LIMIT_MAX, recent_requests
from telemetry.sink import Sink
from telemetry.store import STORE_ERRORS, Store

log = structlog.get_logger(__name__)

T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ID_CHARS_MAX = 256
_UNIX_MS_MAX = 4_102_444_800_000  # 2100


class Api:
    """Routes of the service."""

    def __init__(
        self,
        store: Store,
        sink: Sink,
        progress: Progress,
        metrics: Metrics,
        admin_key_sha256: str,
    ) -> None:
        self._store = store
        self._sink = sink
        self._progress = progress
        self._metrics = metrics
        self._admin_key_sha256 = admin_key_sha256

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[_problems])
        app.router.add_get("/v1/requests", self._requests)
        app.router.add_get("/v1/rollouts/{rollout_id}/windows", self._windows)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_text)
        return app

    async def _requests(self, request: web.Request) -> web.Response:
        self._check_key(request)
        limit = _number(request, "limit", 1, LIMIT_MAX, default=20)
        tenant_id = _id(request, "tenant")
        are_copies = request.query.get("copies", "false")
        if are_copies not in {"true", "false"}:
            raise BadRequestError(
                ErrorCode.INVALID_REQUEST, "copies must be true or false", param="copies"
            )
        rows = await _asked(
            recent_requests(
                self._store, limit=limit, tenant_id=tenant_id, are_copies=are_copies == "true"
            )
        )
        return web.json_response({"data": rows})

    async def _windows(self, request: web.Request) -> web.Response:
        """Tell the windows of a rollout that are ingested for sure, the first 1,000 of them."""
        self._check_key(request)
        window_ms = _number(
            request, "window_ms", evidence.WINDOW_MS_MIN, evidence.WINDOW_MS_MAX, default=10_000
        )
        after_ms = _number(request, "after_ms", 0, _UNIX_MS_MAX)
        until_ms = _number(request, "until_ms", 0, _UNIX_MS_MAX)
        # Before the query: what is written while it runs may or may not be counted.
        ingested_ms = self._progress.until_ms
        starts_ms = evidence.complete_windows(after_ms, min(until_ms, ingested_ms), window_ms)
        rollout_id = _checked_id("rollout_id", request.match_info["rollout_id"])
        windows = await _asked(evidence.rollout_windows(self._store, rollout_id, starts_ms))
        return web.json_response(
            {
                "window_ms": window_ms,
                "ingested_until_unix_ms": ingested_ms,
                "data": [window.as_json() for window in windows],
            }
        )

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


async def _asked(query: Coroutine[Any, Any, T]) -> T:
    """Return what a query gives; RejectedError: the store is away or busy."""
    try:
        return await query
    except STORE_ERRORS as error:
        log.warning("query_failed", error=repr(error))
        raise RejectedError(
            ErrorCode.UNAVAILABLE, "the trace store does not answer", retry_after_s=2.0
        ) from error


def _number(
    request: web.Request, name: str, least: int, most: int, *, default: int | None = None
) -> int:
    text = request.query.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"[0-9]{1,15}", text) or not least <= int(text) <= most:
        message = f"{name} must be {least} to {most}"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param=name)
    return int(text)


def _id(request: web.Request, name: str) -> str:
    """Return an id, empty when none is given."""
    return _checked_id(name, request.query.get(name, ""))


def _checked_id(name: str, text: str) -> str:
    if len(text) > _ID_CHARS_MAX:
        raise BadRequestError(ErrorCode.INVALID_REQUEST, f"{name} is no id", param=name)
    return text


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
