"""Serves replays of a pool's past demand, or of a trace, with the bounds of the request.

Past demand is recorded by scaling, or consists of the requests that the trace store has.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.resources import shown
from control_plane.http.routes import AdminRoute
from control_plane.scaling import repository
from control_plane.scaling.bodies import ScalingReplayBody
from control_plane.scaling.queries import (
    ONE,
    PLAN_FIELDS,
    bounds_of,
    missing_bounds,
    require_pool,
    span_of,
)
from control_plane.scaling.replay import (
    QUARTER_S,
    QUARTERS_MIN,
    REPLAY_HOURS_MAX,
    by_minute,
    kept_curve,
    replay,
    trace_curve,
)
from control_plane.scaling.service import Looked, look_at
from control_plane.scaling.traffic import PoolTraffic, read_traffic
from control_plane.scaling.work import PoolSpeed
from control_plane.telemetry_client import FeedDownError
from control_plane.telemetry_reader import NO_TELEMETRY, TelemetryReader
from sluice.errors import BadRequestError, ErrorCode, PlatformError

_KIND = "scaling"
_HOURS = 24
_BUCKET_S = 15  # seconds of a bucket of requests, which is the time between two plans
_RETRY_S = 2.0
_NOTHING: Mapping[str, int] = MappingProxyType({})
_REPLAYED: dict[str, Any] = {
    "hours": describe.NUMBER,
    "present": describe.OBJECT,
    "asked": describe.OBJECT,
    "recorded": describe.OBJECT,  # empty without requests of the trace store
    "demand": {"type": "array", "items": describe.NUMBER},  # empty without `curves`
}


class ReplayRoutes:
    """The request handlers of replays, which change nothing and run for seconds."""

    def __init__(
        self, database: Database, interval_s: float, telemetry: TelemetryReader = NO_TELEMETRY
    ) -> None:
        """Create the handlers.

        Args:
            database: Database of the pools.
            interval_s: Seconds between two rounds of scaling.
            telemetry: Client of the telemetry service, for the requests of a day.
        """
        self._database = database
        self._telemetry = telemetry
        self._interval_s = interval_s
        self._replaying = asyncio.Lock()

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        answer = describe.shown(("pool_id", *_REPLAYED), types=_REPLAYED)
        kept = describe.operation(
            "Replay the kept demand of a pool, or its requests from `from` to `to`, with its bounds"
            " and with others",
            answer=answer,
            query=(*PLAN_FIELDS, "hours", "from", "to", "curves"),
        )
        trace = describe.operation(
            "Replay the tokens of a trace in a pool, with its bounds and with others",
            answer=answer,
            body=ScalingReplayBody,
            query=("curves",),
        )
        path, read, write = f"{ONE}/replay", Action.READ_PLATFORM, Action.WRITE_FLEET
        return [
            AdminRoute("GET", path, self.kept, read, _KIND, kept),
            AdminRoute("POST", path, self.trace, write, _KIND, trace, is_audited=False),
        ]

    async def kept(self, request: web.Request) -> web.Response:
        """Replay the stored demand of a pool, or the requests of a time range."""
        if "from" in request.query:
            return await self._requests(request)
        key, asked, hours = path_id(request), bounds_of(request), _hours(request)
        pool = await self._look(key)
        curves = {one.pool.role: kept_curve(one.state.history, hours) for one in pool}
        if min(map(len, curves.values())) < QUARTERS_MIN * QUARTER_S:
            message = "less than an hour of demand is kept of this pool: ask again later"
            raise PlatformError(ErrorCode.CONFLICT, message)
        return shown(request, await self._replayed(request, pool, curves, asked))

    async def _requests(self, request: web.Request) -> web.Response:
        key, asked, span = path_id(request), bounds_of(request), span_of(request, datetime.now(UTC))
        pool = await self._look(key)
        speed = _speed(pool)
        objectives_ms = await self._database.run(repository.objectives_ms)
        try:
            found = await read_traffic(self._telemetry, key, span, _BUCKET_S, objectives_ms)
        except FeedDownError as error:
            message = f"{error}; `--trace` replays a file, and `--hours` the recorded demand"
            raise PlatformError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_S) from error
        if not any(found.requests):
            begin, end = (it.isoformat() for it in span)
            message = f"the trace store has no request of pool {key} from {begin} to {end}"
            raise PlatformError(ErrorCode.NOT_FOUND, message)
        tokens = found.prompt_tokens, found.output_tokens, found.step_s
        curves = {it.pool.role: trace_curve(*tokens, speed.of_role(it.pool.role)) for it in pool}
        return shown(request, await self._replayed(request, pool, curves, asked, _recorded(found)))

    async def trace(self, request: web.Request) -> web.Response:
        """Replay a trace, whose tokens are converted to work of the pool's replicas."""
        key, body = path_id(request), await read_body(request, ScalingReplayBody)
        pool = await self._look(key)
        speed = _speed(pool)
        tokens = body.prompt_tokens, body.output_tokens, body.bucket_s
        curves = {it.pool.role: trace_curve(*tokens, speed.of_role(it.pool.role)) for it in pool}
        asked = {name: value for name in PLAN_FIELDS if (value := getattr(body, name)) is not None}
        return shown(request, await self._replayed(request, pool, curves, asked))

    async def _look(self, key: str) -> list[Looked]:
        """Return the pool, or both of its roles."""

        async def work(connection: AsyncConnection) -> list[Looked]:
            found = await repository.scaled_pools(connection, 2 * self._interval_s, [key])
            if not found:
                await require_pool(connection, key)
                raise missing_bounds(key)
            return await look_at(connection, self._interval_s, found)

        return await self._database.run(work)

    async def _replayed(
        self,
        request: web.Request,
        pool: Sequence[Looked],
        curves: Mapping[str, Sequence[float]],
        asked: Mapping[str, Any],
        recorded: Mapping[str, int] = _NOTHING,
    ) -> dict[str, Any]:
        """Return the results with the present bounds and with the requested bounds.

        The result has the figures of each minute if the request has `curves=true`.
        """
        bounds = {
            one.pool.role: replace(one.pool.settings, pin=None, is_paused=False) for one in pool
        }
        has_curves = request.query.get("curves") == "true"
        # one replay at a time, because each replay occupies a processor core
        async with self._replaying:
            tried = {
                "present": bounds,
                "asked": {role: replace(it, **asked) for role, it in bounds.items()},
            }
            results = {
                name: asdict(await asyncio.to_thread(replay, curves, pool[-1].state, it))
                for name, it in tried.items()
            }
        curve = [sum(work) for work in zip(*curves.values(), strict=True)]
        if not has_curves:
            for result in results.values():
                del result["curves"]
        return {
            "pool_id": pool[-1].pool.id,
            "hours": round(len(curve) / 3600, 2),
            "recorded": dict(recorded),
            "demand": by_minute(curve) if has_curves else [],
            **results,
        }


def _speed(pool: Sequence[Looked]) -> PoolSpeed:
    if (speed := pool[-1].speed) is None:
        message = "no speed of this pool is measured: send it requests for some minutes first"
        raise PlatformError(ErrorCode.CONFLICT, message)
    return speed


def _recorded(found: PoolTraffic) -> dict[str, int]:
    """Return the number of requests, and of minutes in which requests missed the objective."""
    each = 60 // found.step_s
    late, judged = (
        [sum(counts[at : at + each]) for at in range(0, len(counts), each)]
        for counts in (found.late, found.judged)
    )
    minutes = replace(found, step_s=60, late=late, judged=judged)
    return {"requests": sum(found.requests), "violation_minutes": sum(minutes.violated)}


def _hours(request: web.Request) -> int:
    text = request.query.get("hours", str(_HOURS))
    if not re.fullmatch(r"[0-9]{1,3}", text) or not 1 <= int(text) <= REPLAY_HOURS_MAX:
        message = f"hours must be a whole number from 1 to {REPLAY_HOURS_MAX}"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="hours")
    return int(text)
