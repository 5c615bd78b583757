"""Serves replays of a pool's stored demand, or of a trace, with the bounds of the request."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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
from control_plane.scaling.queries import ONE, PLAN_FIELDS, bounds_of, missing_bounds
from control_plane.scaling.replay import (
    QUARTER_S,
    QUARTERS_MIN,
    REPLAY_HOURS_MAX,
    kept_curve,
    replay,
    trace_curve,
)
from control_plane.scaling.service import Looked, look_at
from sluice.errors import BadRequestError, ErrorCode, PlatformError

_KIND = "scaling"
_HOURS = 24
_REPLAYED: dict[str, Any] = {
    "hours": describe.NUMBER,
    "present": describe.OBJECT,
    "asked": describe.OBJECT,
}


class ReplayRoutes:
    """The request handlers of replays, which change nothing and run for seconds."""

    def __init__(self, database: Database, interval_s: float) -> None:
        """Create the handlers.

        `interval_s` is the time between two rounds of scaling, in seconds.
        """
        self._database = database
        self._interval_s = interval_s
        self._replaying = asyncio.Lock()

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        answer = describe.shown(("pool_id", *_REPLAYED), types=_REPLAYED)
        kept = describe.operation(
            "Replay the kept demand of a pool, with its bounds and with others",
            answer=answer,
            query=(*PLAN_FIELDS, "hours"),
        )
        trace = describe.operation(
            "Replay the tokens of a trace in a pool, with its bounds and with others",
            answer=answer,
            body=ScalingReplayBody,
        )
        path, read, write = f"{ONE}/replay", Action.READ_PLATFORM, Action.WRITE_FLEET
        return [
            AdminRoute("GET", path, self.kept, read, _KIND, kept),
            AdminRoute("POST", path, self.trace, write, _KIND, trace, is_audited=False),
        ]

    async def kept(self, request: web.Request) -> web.Response:
        """Replay the stored demand of a pool."""
        key, asked, hours = path_id(request), bounds_of(request), _hours(request)
        pool = await self._look(key)
        curve = kept_curve(pool.state.history, hours)
        if len(curve) < QUARTERS_MIN * QUARTER_S:
            message = "less than an hour of demand is kept of this pool: ask again later"
            raise PlatformError(ErrorCode.CONFLICT, message)
        return shown(request, await self._replayed(pool, curve, asked))

    async def trace(self, request: web.Request) -> web.Response:
        """Replay a trace, whose tokens are converted to work of the pool's replicas."""
        key, body = path_id(request), await read_body(request, ScalingReplayBody)
        pool = await self._look(key)
        if pool.speed is None:
            message = "no speed of this pool is measured: send it requests for some minutes first"
            raise PlatformError(ErrorCode.CONFLICT, message)
        curve = trace_curve(body.prompt_tokens, body.output_tokens, body.bucket_s, pool.speed)
        asked = {name: value for name in PLAN_FIELDS if (value := getattr(body, name)) is not None}
        return shown(request, await self._replayed(pool, curve, asked))

    async def _look(self, key: str) -> Looked:
        async def work(connection: AsyncConnection) -> Looked:
            found = await repository.scaled_pools(connection, 2 * self._interval_s, [key])
            if not found:
                raise missing_bounds(key)
            return (await look_at(connection, self._interval_s, found))[0]

        return await self._database.run(work)

    async def _replayed(
        self, one: Looked, curve: Sequence[float], asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the results with the present bounds and with the requested bounds."""
        bounds = replace(one.pool.settings, pin=None, is_paused=False)
        # one replay at a time, because each replay occupies a processor core
        async with self._replaying:
            tried = {"present": bounds, "asked": replace(bounds, **asked)}
            results = {
                name: asdict(await asyncio.to_thread(replay, curve, one.state, it))
                for name, it in tried.items()
            }
        return {"pool_id": one.pool.id, "hours": round(len(curve) / 3600, 2), **results}


def _hours(request: web.Request) -> int:
    text = request.query.get("hours", str(_HOURS))
    if not re.fullmatch(r"[0-9]{1,3}", text) or not 1 <= int(text) <= REPLAY_HOURS_MAX:
        message = f"hours must be a whole number from 1 to {REPLAY_HOURS_MAX}"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="hours")
    return int(text)
