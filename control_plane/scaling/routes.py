"""Serves the admin REST of scaling, for bounds of pools, numbers set by hand, and decisions."""

import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from aiohttp import web
from sqlalchemy import Float, cast, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.fleet.node_routes import shown_times
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.columns import columns
from control_plane.http.resources import Values, fetch, first, page, page_of, shown
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from control_plane.scaling import repository
from control_plane.scaling.bodies import ScalingBody, ScalingBudgetBody, ScalingPinBody
from control_plane.scaling.decision import age_warnings, by_pool, decision_of
from control_plane.scaling.queries import (
    ONE,
    PLAN_FIELDS,
    bounds_of,
    missing_bounds,
    missing_pool,
    require_pool,
)
from control_plane.scaling.service import look_at
from control_plane.scaling.tables import (
    actuator_asks,
    pool_scaling_states,
    pool_scalings,
    scaling_budgets,
    scaling_changes,
)
from control_plane.tables import pools
from sluice.engines import ENGINES
from sluice.errors import BadRequestError, ErrorCode

INTERVAL_S = 15.0
_KIND = "scaling"
_SLEEPERS_SHARE = 0.05  # default of `sleepers_share` if the engine can sleep
_READ, _WRITE = Action.READ_PLATFORM, Action.WRITE_FLEET
_SETTINGS = tuple(ScalingBody.model_fields)
_BY_HAND = ("is_paused", "pin", "pin_prefill", "pin_until", "pinned_by")
_NO_HAND: Values = {
    "is_paused": False,
    "pin": None,
    "pin_prefill": None,
    "pin_until": None,
    "pinned_by": "",
}
_SHOWN = ("pool_id", *_SETTINGS, *_BY_HAND)
_TYPES = {
    "is_paused": describe.BOOLEAN,
    "sleepers_share": describe.NUMBER,
    **dict.fromkeys(("pin", "pin_prefill"), describe.nullable(describe.INTEGER)),
    "pin_until": describe.nullable(describe.TEXT),
}
_DECISION: dict[str, Any] = {
    **dict.fromkeys(
        ("wanted", "ready", "booting", "asleep", "sleepers", "boots"), describe.INTEGER
    ),
    **dict.fromkeys(
        ("demand", "expected", "base", "noise", "backlog_work_s", "boot_s", "tiers_s", "late_s"),
        describe.NUMBER,
    ),
    "cause": describe.TEXT,
    "reasons": {"type": "array", "items": describe.OBJECT},
    "warnings": describe.TEXTS,
    "next_nodes": describe.TEXTS,
    "speed": describe.OBJECT,  # empty before the first measurement
    "tiers": describe.OBJECT,
    "role_decisions": describe.OBJECT,  # empty without roles
    "decided_at": describe.nullable(describe.TEXT),
}
_LISTED = ("pool_id", *_SETTINGS, *_BY_HAND, *_DECISION)
_CHANGE = ("id", "pool_id", "changed_at", "role", "before", "after", "cause", "text")
_BUDGET = tuple(ScalingBudgetBody.model_fields)

Set = Callable[[Write, str, Values], Awaitable[Values]]


class ScalingRoutes:
    """The request handlers of scaling."""

    def __init__(
        self,
        database: Database,
        interval_s: float = INTERVAL_S,
        actuators: Collection[str] = (),
    ) -> None:
        """Create the handlers.

        Args:
            database: Database of the pools.
            interval_s: Seconds between two rounds of the scaling loop.
            actuators: Names of the actuators that a pool may choose.
        """
        self._database = database
        self._writes = Writes(database)
        self._interval_s = interval_s
        self._actuators = actuators

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        return [*self._settings_routes(), *self._hand_routes(), *self._read_routes()]

    def _settings_routes(self) -> list[AdminRoute]:
        seen = describe.shown(_SHOWN, ScalingBody, _TYPES)
        told, budget = describe.operation, describe.shown(_BUDGET, ScalingBudgetBody)
        put = told(
            "Create (201) or replace (200) the bounds within which a pool is scaled",
            answer=seen,
            body=ScalingBody,
            also=(201,),
        )
        of_budget = "/v1/scaling/budget"
        set_budget = told(
            "Set the bounds over all pools together", answer=budget, body=ScalingBudgetBody
        )
        get_budget = told("Show the bounds over all pools together", answer=budget)
        get = told("Show the bounds within which a pool is scaled", answer=seen)
        remove = told("Scale a pool no more; it keeps the replicas it has")
        return [
            AdminRoute("GET", ONE, self.get, _READ, _KIND, get),
            AdminRoute("PUT", ONE, self.put, _WRITE, _KIND, put),
            AdminRoute("DELETE", ONE, self.delete, _WRITE, _KIND, remove),
            AdminRoute("GET", of_budget, self.get_budget, _READ, _KIND, get_budget),
            AdminRoute("PUT", of_budget, self.put_budget, _WRITE, _KIND, set_budget),
        ]

    def _hand_routes(self) -> list[AdminRoute]:
        seen = describe.shown(_SHOWN, ScalingBody, _TYPES)
        told = describe.operation
        pin = told("Set a pool's number by hand", answer=seen, body=ScalingPinBody)
        pause = told("Leave a pool as it is", answer=seen)
        resume = told("Scale a pool again: lift its pause, and a number set by hand", answer=seen)
        return [
            AdminRoute("POST", f"{ONE}/pin", self.pin, _WRITE, _KIND, pin),
            AdminRoute("POST", f"{ONE}/pause", self.pause, _WRITE, _KIND, pause),
            AdminRoute("POST", f"{ONE}/resume", self.resume, _WRITE, _KIND, resume),
        ]

    def _read_routes(self) -> list[AdminRoute]:
        types = _TYPES | _DECISION
        row = describe.shown(_LISTED, ScalingBody, types)
        decision = describe.shown(("pool_id", *_DECISION), types=_DECISION)
        count: Values = dict.fromkeys(("id", "before", "after"), describe.INTEGER)
        change = describe.shown(_CHANGE, types=count)
        told, listing = describe.operation, describe.listing
        status = listing("List the pools that have bounds, with their last decisions", row)
        plan = told(
            "Plan for a pool, with other bounds if given", answer=decision, query=PLAN_FIELDS
        )
        asked = listing(
            "List the actuators of pools, with the state of their requests for nodes",
            describe.shown(actuator_asks.c.keys(), types=columns(actuator_asks)),
        )
        history = listing("List the changes of a pool's number, the newest first", change)
        return [
            AdminRoute("GET", "/v1/scaling", self.list, _READ, _KIND, status),
            AdminRoute("GET", "/v1/scaling/actuators", self.list_asks, _READ, _KIND, asked),
            AdminRoute("GET", f"{ONE}/plan", self.plan, _READ, _KIND, plan),
            AdminRoute("GET", f"{ONE}/changes", self.changes, _READ, _KIND, history),
        ]

    # --- reading --------------------------------------------------------------------------------

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of pools with their last decisions."""
        t, kept = pool_scalings, pool_scaling_states.c
        age_s = cast(func.extract("epoch", func.now() - kept.decided_at), Float)
        query = select(t, kept.decision, kept.decided_at, age_s.label("age_s")).outerjoin(
            pool_scaling_states, kept.pool_id == t.c.pool_id
        )
        told = partial(_listed, interval_s=self._interval_s)
        return await page(self._database, query, t.c.pool_id, request, told)

    async def list_asks(self, request: web.Request) -> web.Response:
        """Return a page of actuators with the state of their requests for nodes."""
        query = select(actuator_asks)
        return await page(self._database, query, actuator_asks.c.name, request, shown_times)

    async def get(self, request: web.Request) -> web.Response:
        """Return the bounds of a pool."""
        key = path_id(request)
        query = select(pools.c.id, pool_scalings)
        query = query.outerjoin(pool_scalings, pool_scalings.c.pool_id == pools.c.id)
        rows = await fetch(self._database, query.where(pools.c.id == key))
        if not rows:
            raise missing_pool(key)
        if rows[0]["pool_id"] is None:
            raise missing_bounds(key)
        return shown(request, _settings(rows[0]))

    async def plan(self, request: web.Request) -> web.Response:
        """Return the decision of a round that ran now, without applying the decision."""
        key, asked = path_id(request), bounds_of(request)

        async def work(connection: AsyncConnection) -> Values:
            found = await repository.scaled_pools(connection, 2 * self._interval_s, None)
            if not any(it.id == key for it in found):
                await require_pool(connection, key)
                raise missing_bounds(key)
            pools_then = [
                replace(it, settings=replace(it.settings, **asked), is_on=True)
                if it.id == key
                else it
                for it in found
            ]
            looked = await look_at(connection, self._interval_s, pools_then)
            group = next(it for it in by_pool(looked) if it[0].pool.id == key)
            return {"pool_id": key, **decision_of(group), "decided_at": None}

        return shown(request, await self._database.run(work))

    async def changes(self, request: web.Request) -> web.Response:
        """Return a page of changes. `?after=` with the last id of a page requests the next page."""
        key, t = path_id(request), scaling_changes.c
        limit, after = page_of(request)
        query = select(scaling_changes).where(t.pool_id == key)
        if after:
            if not re.fullmatch(r"[0-9]{1,18}", after):
                message = "after must be the id of a change"
                raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="after")
            query = query.where(t.id < int(after))
        rows = await fetch(self._database, query.order_by(t.id.desc()).limit(limit + 1))
        if not rows:
            await self._database.run(lambda it: require_pool(it, key))
        data = [row | {"changed_at": row["changed_at"].isoformat()} for row in rows[:limit]]
        return shown(request, {"data": data, "has_more": len(rows) > limit})

    async def get_budget(self, request: web.Request) -> web.Response:
        """Return the bounds over all pools."""
        is_it = scaling_budgets.c.id == repository.BUDGET
        rows = await fetch(self._database, select(scaling_budgets).where(is_it))
        return shown(request, _budget(rows[0] if rows else None))

    # --- writing --------------------------------------------------------------------------------

    async def put(self, request: web.Request) -> web.Response:
        """Create or replace the bounds of a pool.

        If scaling is switched off, the pool's number of replicas does not change.
        """
        body = await read_body(request, ScalingBody)
        values = body.model_dump()
        if body.actuator and body.actuator not in self._actuators:
            known = ", ".join(sorted(self._actuators)) or "none"
            message = f"there is no actuator {body.actuator}: CONTROL_PLANE__SCALING_ACTUATORS has"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, f"{message} {known}", param="actuator")

        async def set_bounds(write: Write, key: str, before: Values) -> Values:
            why = await _why_awake(write, key)
            if why and (body.sleepers_share or body.sleepers_min):
                raise BadRequestError(ErrorCode.INVALID_REQUEST, why, param="sleepers_share")
            if body.sleepers_share is None:
                values["sleepers_share"] = 0.0 if why else _SLEEPERS_SHARE
            if not body.is_on:
                await _keep_number(write, key)
            return before | values

        return await self._set(request, set_bounds, creates=True)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete the bounds of a pool (204)."""
        key = path_id(request)

        async def work(write: Write) -> WriteReply:
            row = await _locked(write, key)
            if row is None:
                raise missing_bounds(key)
            write.check(_settings(row))
            await _keep_number(write, key)
            is_it = pool_scalings.c.pool_id == key
            await write.connection.execute(delete(pool_scalings).where(is_it))
            write.record("delete", key, _settings(row), None, owners=[None])
            return WriteReply(None, key, 204)

        return await self._writes.run(request, work)

    async def pin(self, request: web.Request) -> web.Response:
        """Set the number of replicas by hand."""
        body = await read_body(request, ScalingPinBody)

        async def pinned(write: Write, key: str, before: Values) -> Values:
            until = datetime.now(UTC) + timedelta(seconds=body.for_s) if body.for_s else None
            by = write.request[ACTOR].id
            if body.prefill is not None and not await _has_prefill(write, key):
                message = f"pool {key} has no role prefill: set its roles, or pin without prefill"
                raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="prefill")
            number: Values = {"pin": body.replicas, "pin_prefill": body.prefill}
            return before | number | {"pin_until": until, "pinned_by": by}

        return await self._set(request, pinned)

    async def pause(self, request: web.Request) -> web.Response:
        """Pause scaling of a pool, whose number of replicas is then left unchanged."""

        async def paused(_: Write, __: str, before: Values) -> Values:
            return before | {"is_paused": True}

        return await self._set(request, paused)

    async def resume(self, request: web.Request) -> web.Response:
        """Resume scaling of a pool, and remove a number set by hand."""

        async def resumed(_: Write, __: str, before: Values) -> Values:
            return before | _NO_HAND

        return await self._set(request, resumed)

    async def put_budget(self, request: web.Request) -> web.Response:
        """Set the bounds over all pools."""
        values = (await read_body(request, ScalingBudgetBody)).model_dump()

        async def work(write: Write) -> WriteReply:
            t = scaling_budgets
            query = select(t).where(t.c.id == repository.BUDGET).with_for_update()
            before = _budget(await first(write.connection, query))
            write.check(before)
            made = insert(t).values(id=repository.BUDGET, **values)
            await write.connection.execute(
                made.on_conflict_do_update(index_elements=["id"], set_=values)
            )
            write.record("replace", "budget", before, values, owners=[None])
            return WriteReply(values, "budget")

        return await self._writes.run(request, work)

    async def _set(
        self, request: web.Request, change: Set, *, creates: bool = False
    ) -> web.Response:
        """Apply `change` to the stored bounds of a pool."""
        key = path_id(request)

        async def work(write: Write) -> WriteReply:
            row = await _locked(write, key)
            if row is None and not creates:
                raise missing_bounds(key)
            before = None if row is None else _settings(row)
            write.check(before)
            made = await change(write, key, {"pool_id": key} | (_NO_HAND if row is None else row))
            values = {name: made[name] for name in (*_SETTINGS, *_BY_HAND)}
            query = insert(pool_scalings).values(pool_id=key, **values)
            await write.connection.execute(
                query.on_conflict_do_update(index_elements=["pool_id"], set_=values)
            )
            after = _settings(made)
            write.record("create" if row is None else "change", key, before, after, owners=[None])
            return WriteReply(after, key, 201 if row is None else 200)

        return await self._writes.run(request, work)


async def _locked(write: Write, key: str) -> Values | None:
    """Return the bounds of a pool, with both rows locked, or None if the pool has no bounds."""
    held = select(pools.c.id).where(pools.c.id == key).with_for_update()
    if await first(write.connection, held) is None:
        raise missing_pool(key)
    query = select(pool_scalings).where(pool_scalings.c.pool_id == key).with_for_update()
    return await first(write.connection, query)


async def _why_awake(write: Write, key: str) -> str:
    """Return the reason why the replicas of a pool cannot sleep, or an empty text."""
    row = await first(write.connection, select(pools.c.engine).where(pools.c.id == key))
    assert row is not None, "the pool's row is locked"
    engine = ENGINES.get(row["engine"])
    if engine is None or not engine.can_sleep:
        return f"engine {row['engine']} cannot sleep: set sleepers_share and sleepers_min to 0"
    return ""


async def _has_prefill(write: Write, key: str) -> bool:
    row = await first(write.connection, select(pools.c.roles).where(pools.c.id == key))
    return row is not None and bool(row["roles"].get("prefill"))


async def _keep_number(write: Write, key: str) -> None:
    """Store the present number of replicas as the operators' number, which then applies."""
    query = update(pools).where(pools.c.id == key, pools.c.scaled_replicas.is_not(None))
    kept = query.values(
        replicas_wanted=pools.c.scaled_replicas,
        scaled_replicas=None,
        scaled_sleepers=0,
        scaled_prefill=None,
    )
    await write.connection.execute(kept)


def _settings(row: Values) -> Values:
    until = row["pin_until"]
    found = {name: row[name] for name in _SHOWN}
    return found | {"pin_until": None if until is None else until.isoformat()}


def _listed(row: Values, interval_s: float) -> Values:
    """Return a pool with its last decision, and with a warning if the decision is old."""
    decision: Values = dict.fromkeys(_DECISION)
    decision |= {"reasons": [], "warnings": [], "next_nodes": [], "tiers": {}, "speed": {}}
    decision |= {"cause": "", "role_decisions": {}}
    decision |= dict.fromkeys(("wanted", "ready", "booting", "asleep", "sleepers", "boots"), 0)
    numbers = (
        "demand",
        "expected",
        "base",
        "noise",
        "backlog_work_s",
        "boot_s",
        "tiers_s",
        "late_s",
    )
    decision |= dict.fromkeys(numbers, 0.0)
    decision |= row["decision"] or {}
    at = row["decided_at"]
    decision["warnings"] = age_warnings(row["age_s"] or 0.0, interval_s) + decision["warnings"]
    return _settings(row) | decision | {"decided_at": None if at is None else at.isoformat()}


def _budget(row: Values | None) -> Values:
    if row is None:
        return ScalingBudgetBody().model_dump()
    return {name: row[name] for name in _BUDGET}
