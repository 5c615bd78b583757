"""Serves the HTTP API: queries for holders of the admin key, health and metrics."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sluice.certificates import refusal_of
from sluice.errors import BadRequestError, ErrorCode, PlatformError, RejectedError
from sluice.identity import Service
from telemetry import evidence, params, slo, texts, traces
from telemetry.auto_turns import TURNS_MAX, logged_turns
from telemetry.budget_usage import totals, totals_query
from telemetry.closings import Closer
from telemetry.costs.prices import Prices
from telemetry.costs.query import cost_query, measured
from telemetry.costs.recorded import RecordedHours
from telemetry.costs.report import answer
from telemetry.costs.sums import summed
from telemetry.metrics import TelemetryMetrics
from telemetry.pool_demand import demand_query, pool_demand
from telemetry.progress import IngestProgress
from telemetry.queries import LIMIT_MAX, RequestFilter, recent_requests
from telemetry.reconciliation import mismatch_tokens, reconciled
from telemetry.sink import Sink
from telemetry.store import STORE_ERRORS, Store
from telemetry.tool_calls import tool_usage
from telemetry.usage import Export, closed_until_ms, exported_usage, usage, usage_query
from telemetry.usage_sums import UsageGroup, usage_sums

log = structlog.get_logger(__name__)

T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_CONTENT_TYPES = {
    Export.CSV: "text/csv",
    Export.PARQUET: "application/vnd.apache.parquet",
}
_EXPORTS = {"csv": Export.CSV, "parquet": Export.PARQUET}


class TelemetryApi:
    """The routes of the telemetry service, with their handlers."""

    def __init__(
        self,
        store: Store,
        sink: Sink,
        progress: IngestProgress,
        closer: Closer,
        metrics: TelemetryMetrics,
        admin_key_sha256: str,
        prices: Prices | None = None,
        recorded: RecordedHours | None = None,
    ) -> None:
        self._store = store
        self._sink = sink
        self._progress = progress
        self._closer = closer
        self._metrics = metrics
        self._admin_key_sha256 = admin_key_sha256
        self._prices = prices
        self._recorded = recorded or RecordedHours("", "")

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[_problems])
        app.router.add_get("/v1/requests", self._requests)
        app.router.add_get("/v1/requests/{request_id}", self._trace)
        app.router.add_get("/v1/texts/{request_id}", self._texts)
        app.router.add_delete("/v1/texts", self._erase_texts)
        app.router.add_get("/v1/rollouts/{rollout_id}/windows", self._windows)
        app.router.add_get("/v1/slo", self._slo)
        app.router.add_get("/v1/auto/turns", self._auto_turns)
        app.router.add_get("/v1/usage", self._usage)
        app.router.add_get("/v1/usage/sums", self._sums)
        app.router.add_get("/v1/usage/tools", self._tools)
        app.router.add_post("/v1/usage/totals", self._totals)
        app.router.add_get("/v1/usage/reconciliation", self._reconciliation)
        app.router.add_get("/v1/costs", self._costs)
        app.router.add_get("/v1/pools/{pool_id}/demand", self._pool_demand)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_text)
        return app

    async def _requests(self, request: web.Request) -> web.Response:
        self._check_key(request)
        limit = params.number(request.query, "limit", 1, LIMIT_MAX, default=20)
        copies = params.choice(request.query, "copies", ("false", "true"), default="false")
        wanted = RequestFilter(
            tenant_id=params.ident(request.query, "tenant"),
            key_id=params.ident(request.query, "key"),
            model=params.ident(request.query, "model"),
            statuses=params.statuses(request.query, "status"),
            since_ms=params.moment_ms(request.query, "since", default_ms=0),
            are_copies=copies == "true",
        )
        rows = await _result_of(recent_requests(self._store, wanted, limit=limit))
        return web.json_response({"data": rows})

    async def _trace(self, request: web.Request) -> web.Response:
        """Return all data on a request, which must be the tenant's if the query names one."""
        self._check_key(request)
        request_id = params.ident(request.match_info, "request_id")
        tenant_id = params.ident(request.query, "tenant")
        # The progress is read before the query, so all events up to this time are in the result.
        until_ms = self._progress.until_ms
        trace = await _result_of(traces.find_trace(self._store, request_id, tenant_id=tenant_id))
        until = params.iso(until_ms) if until_ms else None
        if trace is None:
            raise BadRequestError(ErrorCode.NOT_FOUND, traces.missing(request_id, tenant_id, until))
        return web.json_response(trace.as_json() | {"ingested_until": until})

    async def _texts(self, request: web.Request) -> web.Response:
        """Return the stored texts of a request. The query must name the request's tenant."""
        self._check_key(request)
        request_id = params.ident(request.match_info, "request_id")
        tenant_id = params.required(request.query, "tenant")
        rows = await _result_of(texts.find_texts(self._store, tenant_id, request_id))
        return web.json_response({"data": rows}, headers={"Cache-Control": "no-store"})

    async def _erase_texts(self, request: web.Request) -> web.Response:
        """Erase all texts of a tenant. Queries hide them at once, and rows are deleted later."""
        self._check_key(request)
        tenant_id = params.required(request.query, "tenant")
        return web.json_response(
            {"until": await _result_of(texts.erase_texts(self._store, tenant_id))}
        )

    async def _windows(self, request: web.Request) -> web.Response:
        """Return the windows of a rollout whose events are all ingested, at most 1,000."""
        self._check_key(request)
        query = request.query
        least, most = evidence.WINDOW_MS_MIN, evidence.WINDOW_MS_MAX
        window_ms = params.number(query, "window_ms", least, most, default=10_000)
        after_ms = params.number(query, "after_ms", 0, params.UNIX_MS_MAX)
        until_ms = params.number(query, "until_ms", 0, params.UNIX_MS_MAX)
        # The progress is read before the query, because later rows may be missing in the result.
        ingested_ms = self._progress.until_ms
        starts_ms = evidence.complete_windows(after_ms, min(until_ms, ingested_ms), window_ms)
        rollout_id = params.ident(request.match_info, "rollout_id")
        windows = await _result_of(evidence.rollout_windows(self._store, rollout_id, starts_ms))
        return web.json_response(
            {
                "window_ms": window_ms,
                "ingested_until_unix_ms": ingested_ms,
                "data": [window.as_json() for window in windows],
            }
        )

    async def _slo(self, request: web.Request) -> web.Response:
        """Return the service levels of the last minutes: in total, by model, and by minute."""
        self._check_key(request)
        minutes = params.number(request.query, "minutes", 1, slo.MINUTES_MAX, default=60)
        return web.json_response(await _result_of(slo.fared(self._store, minutes)))

    async def _auto_turns(self, request: web.Request) -> web.Response:
        """Return a tenant's choices of `auto`, and the feedback on their answers."""
        self._check_key(request)
        tenant_id = params.required(request.query, "tenant")
        since_ms = params.moment_ms(request.query, "since", default_ms=0)
        limit = params.number(request.query, "limit", 1, TURNS_MAX, default=TURNS_MAX)
        rows = await _result_of(logged_turns(self._store, tenant_id, since_ms, limit))
        return web.json_response({"data": rows})

    async def _usage(self, request: web.Request) -> web.Response:
        """Return usage as JSON, or as a file in CSV or Parquet."""
        self._check_key(request)
        query = usage_query(request.query, int(time.time() * 1000))
        names = ("json", *_EXPORTS)
        name = params.choice(request.query, "format", names, default="json")
        if name != "json":
            export = _EXPORTS[name]
            body = await _result_of(exported_usage(self._store, query, export))
            return web.Response(body=body, content_type=_CONTENT_TYPES[export])
        closed_ms = closed_until_ms(min(self._progress.until_ms, self._closer.until_ms))
        rows = await _result_of(usage(self._store, query))
        from_ms, to_ms = query.span_ms
        return web.json_response(
            {
                "from": params.iso(from_ms),
                "to": params.iso(to_ms),
                "granularity": query.granularity,
                "closed_until": params.iso(closed_ms) if closed_ms else None,
                "data": rows,
            }
        )

    async def _sums(self, request: web.Request) -> web.Response:
        """Return usage of whole days for web pages, summed by tenant, key, model or day."""
        self._check_key(request)
        query = usage_query({"granularity": "day", **request.query}, int(time.time() * 1000))
        by = params.choice(request.query, "by", tuple(UsageGroup), default=UsageGroup.TENANT)
        found = await _result_of(usage_sums(self._store, query, UsageGroup(by)))
        from_ms, to_ms = query.span_ms
        return web.json_response({"from": params.iso(from_ms), "to": params.iso(to_ms), **found})

    async def _tools(self, request: web.Request) -> web.Response:
        """Return the number, the durations and the prices of server tools' calls."""
        self._check_key(request)
        query = usage_query(request.query, int(time.time() * 1000))
        rows = await _result_of(tool_usage(self._store, query))
        from_ms, to_ms = query.span_ms
        return web.json_response(
            {
                "from": params.iso(from_ms),
                "to": params.iso(to_ms),
                "granularity": query.granularity,
                "data": rows,
            }
        )

    async def _totals(self, request: web.Request) -> web.Response:
        """Return the usage of many tenants. Their ids are in the body, because URLs are short."""
        self._check_key(request)
        query = await totals_query(request)
        # The progress is read before the query, so all events up to this time are in the result.
        ingested_ms = self._progress.until_ms
        rows = await _result_of(totals(self._store, query))
        return web.json_response({"ingested_until_unix_ms": ingested_ms, "data": rows})

    async def _reconciliation(self, request: web.Request) -> web.Response:
        """Return the differences between the ledger and the engines, by hour and model."""
        self._check_key(request)
        query = usage_query(request.query, int(time.time() * 1000))
        if query.tenant_id or query.key_id:
            message = "engines do not know tenants and keys: leave them out"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="tenant")
        closed_ms = closed_until_ms(min(self._progress.until_ms, self._closer.until_ms))
        from_ms, to_ms = query.span_ms
        hours = await _result_of(reconciled(self._store, from_ms, to_ms, closed_ms))
        hours = [hour for hour in hours if query.model in ("", hour.model)]
        return web.json_response(
            {
                "from": params.iso(from_ms),
                "to": params.iso(to_ms),
                "closed_until": params.iso(closed_ms) if closed_ms else None,
                "mismatch_tokens": mismatch_tokens(hours),
                "data": [hour.as_json() for hour in hours],
            }
        )

    async def _costs(self, request: web.Request) -> web.Response:
        """Return costs. For a caller with its own price list, return the measured work instead."""
        self._check_key(request)
        query = cost_query(request.query, int(time.time() * 1000))
        form = params.choice(request.query, "format", ("costs", "work"), default="costs")
        if form == "work" and query.tenant_id:
            message = "work is that of the whole fleet: leave the tenant out"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="tenant")
        if form == "costs" and self._prices is None:
            message = "no price list: set TELEMETRY__PRICES_FILE, or give your own with --prices"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="format")
        # Web pages show sums of whole hours, which are a few minutes old.
        is_summed = params.choice(request.query, "sums", ("false", "true"), default="false")
        if is_summed == "true" and (query.tenant_id or form == "work"):
            message = "sums are of the whole fleet, and of costs: leave the tenant and the form out"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="sums")
        hours = params.choice(request.query, "hours", ("none", "recorded"), default="none")
        if form == "costs" and self._prices is not None and self._prices.recorded_pools:
            hours = "recorded"
        as_of = {}
        if is_summed == "true":
            found, span_ms, moment = await _result_of(summed(self._store, query))
            query, as_of = replace(query, span_ms=span_ms), {"as_of": moment}
        else:
            found = await _result_of(measured(self._store, query.span_ms))
        if hours == "recorded":
            found = replace(found, recorded=await self._recorded.of(query.span_ms))
        if form == "work" or self._prices is None:
            from_ms, to_ms = query.span_ms
            return web.json_response({"span_ms": [from_ms, to_ms], **found.as_json()})
        # A thread builds the answer, because up to 100,000 rows are processed in Python.
        told = await asyncio.to_thread(answer, self._prices, found, query)
        return web.json_response(as_of | told)

    async def _pool_demand(self, request: web.Request) -> web.Response:
        """Return a pool's requests and tokens per bucket of time, without tenants."""
        self._check_key(request)
        query = demand_query(request.match_info, request.query)
        sums = await _result_of(pool_demand(self._store, query))
        return web.json_response({"step_s": query.step_ms // 1000, **sums})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready = self._sink.is_ready
        return web.json_response(
            {"status": "ok" if ready else "waiting for broker or trace store"},
            status=200 if ready else 503,
        )

    async def _metrics_text(self, request: web.Request) -> web.Response:
        if why := refusal_of(request.transport, Service.METRICS):
            return web.Response(status=403, text=f"{why}\n")
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


async def _result_of(query: Coroutine[Any, Any, T]) -> T:
    """Return the result of a query. Raises RejectedError if the store is down or busy."""
    try:
        return await query
    except STORE_ERRORS as error:
        log.warning("query_failed", error=repr(error))
        raise RejectedError(
            ErrorCode.UNAVAILABLE, "the trace store does not answer", retry_after_s=2.0
        ) from error


@web.middleware
async def _problems(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer errors as problem details (RFC 9457) that contain the platform's error code."""
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
