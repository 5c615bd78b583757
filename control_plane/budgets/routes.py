"""REST of budgets, which are written below their tenant and listed with their usage."""

from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.budgets import repository
from control_plane.budgets.model import BUDGETS_MAX, UNKNOWN, BudgetBody, State
from control_plane.budgets.tables import budget_states, budgets
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.resources import Values, fetch, first, lock_id, page, shown, visible
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from control_plane.rollouts.repository import clock_ms
from control_plane.tables import models, tenants
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.ids import new_id

_KIND = "budgets"
_SETTINGS = tuple(BudgetBody.model_fields)
_SHOWN = ("id", "tenant_id", "name", *_SETTINGS)
_STATES = (*State, UNKNOWN)
# Further fields of a list entry. A field is null if its value is unknown.
_USE: dict[str, Any] = {
    "state": {"type": "string", "enum": [str(state) for state in _STATES]},
    "used": {"type": ["integer", "null"]},
    "reached_percent": {"type": ["integer", "null"]},
    "since": {"type": ["string", "null"]},
    "period_start": {"type": ["string", "null"]},
    "period_end": {"type": ["string", "null"]},
    "age_s": {"type": ["number", "null"]},
    "stop_delay_s": {"type": ["number", "null"]},
}
INTERVAL_S = 15.0


class BudgetRoutes:
    """The request handlers of budgets."""

    def __init__(self, database: Database, interval_s: float = INTERVAL_S) -> None:
        """Create the handlers.

        `interval_s` is the number of seconds between two queries of a budget's usage. Answers
        contain it.
        """
        self._database = database
        self._writes = Writes(database)
        self._interval_s = interval_s

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        one = "/v1/tenants/{tenant_id:[^/]+}/budgets/{name:[^/]+}"
        read, write = Action.READ_USAGE, Action.WRITE_TENANTS
        seen = describe.shown(_SHOWN, BudgetBody)
        used = describe.shown(_SHOWN, BudgetBody)
        used["properties"] |= _USE
        told = describe.operation
        summary = "List budgets with what is used of them"
        listing = describe.listing(summary, used, ("tenant_id", "state"))
        summary = "Create (201) or replace (200) a budget"
        put = told(summary, answer=seen, body=BudgetBody, also=(201,))
        get = told("Show a budget", answer=seen)
        return [
            AdminRoute("GET", "/v1/budgets", self.list, read, _KIND, listing),
            AdminRoute("GET", one, self.get, read, _KIND, get),
            AdminRoute("PUT", one, self.put, write, _KIND, put),
            AdminRoute("DELETE", one, self.delete, write, _KIND, told("Remove a budget")),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of budgets, optionally of one tenant or in one state."""
        now_ms = await self._database.run(clock_ms)
        query = visible(request, repository.with_states(), budgets.c.tenant_id)
        if (tenant_id := request.query.get("tenant_id")) is not None:
            query = query.where(budgets.c.tenant_id == tenant_id.replace("\0", ""))
        if (state := request.query.get("state")) is not None:
            query = query.where(repository.shown_state(now_ms) == _state(state))

        def show(row: Values) -> Values:
            return _settings(row) | _use(row, now_ms, self._interval_s)

        return await page(self._database, query, budgets.c.id, request, show)

    async def get(self, request: web.Request) -> web.Response:
        """Return the settings of one budget."""
        tenant_id, name = _path(request)
        if not request[ACTOR].may(Action.READ_USAGE, tenant_id):
            raise _missing(tenant_id, name)
        is_it = (budgets.c.tenant_id == tenant_id, budgets.c.name == name)
        rows = await fetch(self._database, select(budgets).where(*is_it))
        if not rows:
            raise _missing(tenant_id, name)
        return shown(request, _settings(rows[0]))

    async def put(self, request: web.Request) -> web.Response:
        """Create or replace a budget, and compute its new state at once from the stored usage."""
        tenant_id, name = _path(request)
        object_id = f"{tenant_id}/{name}"
        body = await read_body(request, BudgetBody)
        values = body.model_dump(mode="json")

        async def work(write: Write) -> WriteReply:
            write.require(tenant_id)
            rows = await _locked(write.connection, tenant_id)
            before = next((row for row in rows if row["name"] == name), None)
            write.check(None if before is None else _settings(before))
            await _check_model(write.connection, body.model_id)
            if before is None:
                after = await _insert(write.connection, tenant_id, name, values, len(rows))
                write.record("create", object_id, None, after, owners=[tenant_id])
                return WriteReply(after, object_id, 201)
            shown_before = _settings(before)
            await _replace(write.connection, before, values)
            await repository.write_stops(write.connection, [tenant_id], rows)
            after = _settings(before)
            write.record("replace", object_id, shown_before, after, owners=[tenant_id])
            return WriteReply(after, object_id)

        return await self._writes.run(request, work)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a budget (204), so that gateways accept the requests that it stopped."""
        tenant_id, name = _path(request)
        object_id = f"{tenant_id}/{name}"

        async def work(write: Write) -> WriteReply:
            write.require(tenant_id)
            rows = await _locked(write.connection, tenant_id)
            row = next((row for row in rows if row["name"] == name), None)
            if row is None:
                raise _missing(tenant_id, name)
            before = _settings(row)
            write.check(before)
            await write.connection.execute(delete(budgets).where(budgets.c.id == row["id"]))
            rest = [other for other in rows if other is not row]
            await repository.write_stops(write.connection, [tenant_id], rest)
            write.record("delete", object_id, before, None, owners=[tenant_id])
            return WriteReply(None, object_id, 204)

        return await self._writes.run(request, work)


def _state(text: str) -> str:
    if text in _STATES:
        return text
    message = f"state must be one of {', '.join(_STATES)}"
    raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="state")


def _path(request: web.Request) -> tuple[str, str]:
    return path_id(request, "tenant_id"), path_id(request, "name")


async def _locked(connection: AsyncConnection, tenant_id: str) -> list[Values]:
    """Return all budgets of a tenant, locked so that none can be added meanwhile."""
    await connection.execute(lock_id(_KIND, tenant_id))
    if await first(connection, select(tenants.c.id).where(tenants.c.id == tenant_id)) is None:
        raise PlatformError(ErrorCode.NOT_FOUND, f"there is no tenants/{tenant_id}")
    return await repository.lock(connection, [tenant_id])


async def _check_model(connection: AsyncConnection, model_id: str) -> None:
    """Refuse a budget of an unknown model, because the ledger would never have usage for it."""
    query = select(models.c.id).where(models.c.id == model_id)
    if model_id and await first(connection, query) is None:
        message = (
            f"model_id: there is no model {model_id}; budgets go by a model's own name, not by an"
            " alias or release"
        )
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="model_id")


async def _insert(
    connection: AsyncConnection, tenant_id: str, name: str, values: Values, others: int
) -> Values:
    """Store a new budget, whose usage has not been read yet."""
    if others >= BUDGETS_MAX:
        message = f"tenant {tenant_id} has {others} budgets, and no tenant has more: remove one"
        raise PlatformError(ErrorCode.CONFLICT, message)
    row = {"id": new_id("budget"), "tenant_id": tenant_id, "name": name} | values
    await connection.execute(insert(budgets).values(row))
    return _settings(row)


async def _replace(connection: AsyncConnection, row: Values, values: Values) -> None:
    """Replace a budget in the database and in the given row of `with_states`."""
    counts_the_same = all(row[name] == values[name] for name in ("period", "model_id"))
    reached = 0 if row["state"] is None else repository.reached_percent(row)
    row |= values
    query = budgets.update().where(budgets.c.id == row["id"])
    await connection.execute(query.values(values))
    if row["state"] is None:
        return
    if counts_the_same:
        await repository.apply_usage(connection, row, reached)
    else:
        is_it = budget_states.c.budget_id == row["id"]
        await connection.execute(delete(budget_states).where(is_it))
        row["state"] = None


def _settings(row: Values) -> Values:
    return {name: row[name] for name in _SHOWN}


def _use(row: Values, now_ms: int, interval_s: float) -> Values:
    """Return the state and the usage of a budget in the present period.

    `stop_delay_s` is the time from the request that exhausts the budget until gateways reject
    requests. It is the sum of the ledger's present lag and the interval between two queries of the
    ledger.
    """
    looked_at, ingested_ms = row["looked_at"], row["ingested_until_unix_ms"]
    age_s = None if looked_at is None else round(now_ms / 1000 - looked_at.timestamp(), 1)
    found = dict.fromkeys(_USE) | {"state": UNKNOWN, "age_s": age_s}
    if looked_at is None or age_s is None or row["ends_at_unix_ms"] <= now_ms:
        return found
    budget, usage = repository.budget_of(row), repository.usage_of(row)
    lag_s = looked_at.timestamp() - ingested_ms / 1000
    return found | {
        "state": row["state"],
        "used": budget.used(usage),
        "reached_percent": budget.reached_percent(usage),
        "since": row["since"].isoformat(),
        "period_start": _iso(row["starts_at_unix_ms"]),
        "period_end": _iso(row["ends_at_unix_ms"]),
        "stop_delay_s": round(max(0.0, lag_s) + max(interval_s, age_s), 1) if ingested_ms else None,
    }


def _iso(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat()


def _missing(tenant_id: str, name: str) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no tenants/{tenant_id}/budgets/{name}")
