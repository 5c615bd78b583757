"""REST that creates and reads rollouts, and executes operators' commands on rollouts.

The REST of plans is `control_plane.rollouts.plan_routes`.
"""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web
from sqlalchemy import RowMapping, Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import percent
from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.resources import fetch, first, page, shown, visible
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from control_plane.rollouts import effects, listing, repository
from control_plane.rollouts.beginning import begin
from control_plane.rollouts.bodies import PromoteBody, RolloutBody
from control_plane.rollouts.plan import MIRRORED, SHARE
from control_plane.rollouts.repository import UnreadableError, rollout_of
from control_plane.rollouts.shown import DETAILS, EVENT, SUMMARY, details, unknown_details
from control_plane.rollouts.state import Abort, Event, Pause, Promote, Resume, Start
from control_plane.rollouts.tables import rollout_events, rollouts
from sluice.errors import ErrorCode, PlatformError

Values = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.Response]]
_KIND = "rollouts"


class RolloutRoutes:
    """The request handlers of rollouts."""

    def __init__(
        self,
        database: Database,
        wake: Callable[[], None],
        unread: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create the handlers.

        Args:
            database: Database of rollouts.
            wake: Wakes the loop that steps rollouts.
            unread: Reasons why the loop cannot read a live rollout, by id. The loop updates the
                mapping.
        """
        self._database = database
        self._writes = Writes(database)
        self._wake = wake
        self._unread = unread

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        every, one = "/v1/rollouts", "/v1/rollouts/{id}"
        read, write, control = (
            Action.READ_TENANT,
            Action.WRITE_ROLLOUTS,
            Action.CONTROL_ROLLOUTS,
        )
        row = _described((*SUMMARY, *DETAILS))
        listing = describe.listing("List rollouts", _described(SUMMARY), ("model_id", "phase"))
        create = describe.operation(
            "Roll a release of a model out", answer=row, status=201, body=RolloutBody
        )
        get = describe.operation("Show a rollout, with its counts", answer=row)
        history = describe.listing("List the events of a rollout", _described(EVENT))
        promote = describe.operation(
            "End a stage early; no stage is left out", answer=row, body=PromoteBody
        )
        found = [
            AdminRoute("POST", every, self.create, write, _KIND, create),
            AdminRoute("GET", every, self.list, read, _KIND, listing),
            AdminRoute("GET", one, self.get, read, _KIND, get),
            AdminRoute("GET", f"{one}/events", self.events, read, _KIND, history),
            AdminRoute("POST", f"{one}/promote", self.promote, write, _KIND, promote),
        ]
        for command, action, summary in (
            (Start(), write, "Start a rollout that is planned"),
            (Pause(), control, "Hold a rollout: the share stays"),
            (Resume(), control, "Let a paused rollout go on"),
            (Abort(), control, "End a rollout: all traffic goes back to control"),
        ):
            told = describe.operation(summary, answer=row)
            path = f"{one}/{command.kind}"
            found.append(AdminRoute("POST", path, self._command(command), action, _KIND, told))
        return found

    async def create(self, request: web.Request) -> web.Response:
        """Create a rollout (201), and start it unless `is_started` is false."""
        body = await read_body(request, RolloutBody)

        async def work(write: Write) -> WriteReply:
            kept = await begin(
                write, body.model_id, body.release, body.plan, is_started=body.is_started
            )
            after = self._show(await _row(write.connection, kept.id))
            write.record("create", kept.id, None, _short(after), owners=[kept.owner])
            return WriteReply(after, kept.id, 201)

        answer = await self._writes.run(request, work)
        self._wake()
        return answer

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of rollouts, the newest first."""
        query = visible(request, listing.listed(), rollouts.c.owner_tenant_id)
        for name in ("model_id", "phase"):
            if (wanted := request.query.get(name)) is not None:
                query = query.where(rollouts.c[name] == wanted.replace("\0", ""))
        key = rollouts.c.id

        def summary(row: Values) -> Values:
            return listing.summary(row, self._unread)

        return await page(self._database, query, key, request, summary, newest_first=True)

    async def get(self, request: web.Request) -> web.Response:
        """Return one rollout."""
        return shown(request, self._show(await self._readable(request)))

    async def events(self, request: web.Request) -> web.Response:
        """Return a page of a rollout's events, the oldest first."""
        found = await self._readable(request)
        query = select(rollout_events).where(rollout_events.c.rollout_id == found["id"])
        return await page(self._database, query, rollout_events.c.id, request, _event)

    async def promote(self, request: web.Request) -> web.Response:
        """End the present stage of a rollout early."""
        body = await read_body(request, PromoteBody)
        return await self._apply(request, Promote(body.stage))

    def _command(self, command: Event) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            return await self._apply(request, command)

        return handle

    async def _apply(self, request: web.Request, command: Event) -> web.Response:
        """Step a rollout by an operator's command."""
        rollout_id = path_id(request)

        async def work(write: Write) -> WriteReply:
            connection = write.connection
            locked = await repository.lock(connection, rollout_id)
            owner = None if locked is None else locked["owner_tenant_id"]
            if locked is None or not write.actor.may(Action.READ_TENANT, owner):
                raise _no_rollout(rollout_id)
            write.require(owner)
            before = self._show(await _row(connection, rollout_id))
            write.check(before)
            await _step_locked(write, locked, command)
            after = self._show(await _row(connection, rollout_id))
            write.record(command.kind, rollout_id, _short(before), _short(after), owners=[owner])
            return WriteReply(after, rollout_id)

        answer = await self._writes.run(request, work)
        self._wake()
        return answer

    async def _readable(self, request: web.Request) -> Values:
        """Return the row of a rollout. Raises NOT_FOUND if the caller may not read it."""
        rollout_id = path_id(request)
        rows = await fetch(self._database, _one(rollout_id))
        may = request[ACTOR].may
        if not (rows and may(Action.READ_TENANT, rows[0]["owner_tenant_id"])):
            raise _no_rollout(rollout_id)
        return rows[0]

    def _show(self, row: Values) -> Values:
        """Return all fields of a row. If its state is unreadable, only the columns are returned."""
        try:
            state = rollout_of(row).state
        except UnreadableError as error:
            problem = {row["id"]: error.problem}
            more = unknown_details() | {"verdict": None, "version": row["version"]}
            more |= {"trials": row["trials"]}
            return listing.summary(row, problem) | more
        verdict = None if state.verdict is None else repository.verdict_document(state.verdict)
        found = details(state, row["canary_base"], row["lacking"])
        more = found | {"verdict": verdict, "version": row["version"], "trials": row["trials"]}
        return listing.summary(row, {}) | more


async def _step_locked(write: Write, locked: RowMapping, command: Event) -> None:
    """Step a rollout whose row is locked. An unreadable rollout accepts only an abort."""
    now_ms = await repository.clock_ms(write.connection)
    try:
        kept = rollout_of(locked)
    except UnreadableError:
        if not (isinstance(command, Abort) and locked["is_live"]):
            raise
        await effects.give_up(write.connection, locked, now_ms, write.actor.id)
    else:
        await effects.apply(write.connection, kept, (command,), now_ms, write.actor.id)


def _one(rollout_id: str) -> Select[Any]:
    return listing.with_state(listing.listed()).where(rollouts.c.id == rollout_id)


async def _row(connection: AsyncConnection, rollout_id: str) -> Values:
    row = await first(connection, _one(rollout_id))
    assert row is not None, "it is locked"
    return row


def _short(found: Values) -> Values:
    """Return the fields for the audit log. The other fields are stored in the rollout's events."""
    return {name: found[name] for name in SUMMARY}


def _event(row: Values) -> Values:
    found = percent.shown(row, SHARE, MIRRORED) | {"at": row["at"].isoformat()}
    return {name: found[name] for name in EVENT}


def _no_rollout(rollout_id: str) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no rollout {rollout_id}")


_TYPES: dict[str, tuple[str, ...]] = {
    "integer": (
        *("stage", "stages", "wanted_stage", "wanted", "sample"),
        *("control_sample", "sample_needed", "evidence_until_unix_ms", "version"),
    ),
    "boolean": ("is_live", "is_ready"),
    "number": ("watched_s", "watched_needed_s", SHARE.shown, MIRRORED.shown),
    "object": ("plan",),
}
_SCHEMAS: Values = {
    **{name: {"type": kind} for kind, names in _TYPES.items() for name in names},
    **{
        name: {"type": "array", "items": {"type": "object"}}
        for name in ("gates", "past_stages", "trials")
    },
    "verdict": {"type": ["object", "null"]},
    "stage_left_s": {"type": ["number", "null"]},
}


def _described(fields: tuple[str, ...]) -> Values:
    """Return the JSON schema of a rollout's answer with the given fields."""
    found = describe.shown(fields)
    found["properties"] |= {name: _SCHEMAS[name] for name in fields if name in _SCHEMAS}
    return found
