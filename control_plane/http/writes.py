"""Runs every write of the admin REST in one transaction with its audit rows.

A handler defines its work and passes it to `Writes.run`:

    async def work(write: Write) -> Answer:
        before = ...  # under a row lock
        write.check(before)  # If-Match, If-None-Match
        ...
        write.record("replace", thing_id, before, after, owners=[owner])
        return Answer(after, thing_id)

    return await self._writes.run(request, work)

The caller receives the result after the transaction has been committed. If PostgreSQL fails during
the commit, the work runs again unless the first attempt was committed.
"""

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Actor, roles_for
from control_plane.audit import repository
from control_plane.audit.model import (
    KeptAnswer,
    check_replay,
    checked_key,
    fingerprint,
    recordable,
)
from control_plane.audit.repository import AuditRow
from control_plane.database import Database
from control_plane.http.bodies import check_repeated
from control_plane.http.etags import check, etag
from control_plane.http.routes import ACTOR, REPEATED, REQUEST_ID, ROUTE, AdminRoute
from sluice.errors import ErrorCode, PlatformError
from sluice.ids import new_id

Values = dict[str, Any]

# Set on a request whose audit rows have been written.
RECORDED = web.RequestKey("recorded", bool)
_DONE = "done"


class _What(NamedTuple):
    """The contents of a write's audit row, with fields of `AuditRow`."""

    verb: str
    object_id: str
    kind: str = ""
    outcome: str = _DONE
    detail: str = ""
    before: Values | None = None
    after: Values | None = None


@dataclass(frozen=True, slots=True)
class WriteReply:
    """The answer of a write.

    Attributes:
        body: JSON body, or None if the answer has no body.
        object_id: Id of the written object.
        status: HTTP status. An answer with 204 has no body.
        is_secret: Whether the body contains a secret, and so must not be stored.
    """

    body: Values | None
    object_id: str
    status: int = 200
    is_secret: bool = False

    @property
    def text(self) -> str:
        """The body in the form that is sent."""
        return "" if self.body is None else json.dumps(self.body)


def _no_rows() -> list[AuditRow]:
    return []


@dataclass(slots=True)
class Write:
    """A write that is in progress.

    Attributes:
        connection: Connection of the write's transaction.
        request: Request of the write.
        id: Id of the first audit row.
        key: Idempotency key of the request, or empty without a key.
        rows: Audit rows recorded so far.
        is_checked: Whether the request's conditional headers were checked.
    """

    connection: AsyncConnection
    request: web.Request
    id: str
    key: str
    rows: list[AuditRow] = field(default_factory=_no_rows)
    is_checked: bool = False

    @property
    def actor(self) -> Actor:
        """The caller of the write."""
        return self.request[ACTOR]

    @property
    def route(self) -> AdminRoute:
        """The route of the request."""
        return self.request[ROUTE]

    def check(self, shown: Values | None) -> None:
        """Check the conditional headers against the present object, read under a row lock.

        Raises:
            PlatformError: 412 if the object differs from the caller's copy.
            BadRequestError: The body changes a read-only field.
        """
        check(self.request.headers, shown)
        check_repeated(self.request, shown)
        self.is_checked = True

    def require(self, *owners: str | None) -> None:
        """Check that the caller may write objects of the given tenants, where None is public.

        Raises:
            PlatformError: 403 if the caller may not write them.
        """
        require(self.request, *owners)

    def record(
        self,
        verb: str,
        object_id: str,
        before: Values | None,
        after: Values | None,
        *,
        owners: Iterable[str | None],
        kind: str = "",
    ) -> None:
        """Add an audit row for the effect of the write on an object, after a permission check.

        Args:
            verb: Kind of change, such as `create`, `replace` or `delete`.
            object_id: Id of the object.
            before: Object before the write in the form of a GET, without secrets, or None if it did
                not exist.
            after: Object after the write in the same form, or None if it was deleted.
            owners: Tenants of the object before and after the write. None is public.
            kind: Kind of the object, if it differs from the kind of the route.

        Raises:
            PlatformError: 403 if the caller may not write the object.
        """
        self.require(*owners)
        row_id = f"{self.id}-{len(self.rows)}" if self.rows else self.id
        what = _What(verb, object_id, kind, before=before, after=after)
        self.rows.append(_row(self.request, row_id, what, self.key))


class Writes:
    """Runs the writes of handlers in transactions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def run(
        self,
        request: web.Request,
        work: Callable[[Write], Awaitable[WriteReply]],
        *,
        deadline_s: float = 4.0,
    ) -> web.Response:
        """Return the committed answer of a write, or the stored answer of its idempotency key.

        Args:
            request: Request of the write.
            work: Runs in a transaction, and runs again if the transaction was lost.
            deadline_s: Seconds for all attempts together.

        Raises:
            PlatformError: The work raised the error, or the idempotency key was used for another
                request.
            IntegrityError: The written rows violate a constraint.
        """
        key, request_sha256 = await _idempotency(request)
        actor, write_id = request[ACTOR], new_id("audit")
        attempts = 0
        # results of attempts that may have been committed
        done: list[tuple[WriteReply, AuditRow]] = []

        async def attempt(connection: AsyncConnection) -> tuple[WriteReply | KeptAnswer, bool]:
            nonlocal attempts
            attempts += 1
            if done and await repository.is_recorded(connection, done[-1][1]):
                return done[-1][0], False
            if key:
                may_wait = attempts > 1  # an earlier attempt of this write may still be running
                kept = await repository.take_key(connection, actor.id, key, may_wait=may_wait)
                if kept is not None:
                    check_replay(kept, request_sha256)
                    return kept, True
            write = Write(connection, request, write_id, key)
            answer = await work(write)
            assert write.is_checked or not request.get(REPEATED), "read-only fields were ignored"
            assert write.rows, f"{write.route.public_path} wrote something and recorded nothing"
            await repository.record(connection, write.rows)
            if key:
                body = "" if answer.is_secret else answer.text
                kept = KeptAnswer(
                    request_sha256, answer.status, body, answer.is_secret, answer.object_id
                )
                await repository.keep_answer(connection, actor.id, key, kept)
            done.append((answer, write.rows[0]))
            return answer, False

        answer, is_replay = await self._database.run(attempt, deadline_s=deadline_s)
        request[RECORDED] = True
        return _response(answer, is_replay=is_replay)

    async def refused(self, request: web.Request, error: PlatformError) -> None:
        """Record a refused write in a separate transaction, since the write was rolled back."""
        # The last id in the path is the id of the object.
        object_id = next(reversed(request.match_info.values()), "")
        key = request.headers.get("Idempotency-Key", "")
        verb = request.method.lower()
        what = _What(verb, object_id, outcome=error.code, detail=error.message)
        row = _row(request, new_id("audit"), what, key)
        await self._database.run(lambda connection: repository.record(connection, [row]))


def require(request: web.Request, *owners: str | None) -> None:
    """Check that the caller may perform the route's action on objects of the given tenants.

    Raises:
        PlatformError: 403 if the caller may not. The message names a role that may.
    """
    actor, action = request[ACTOR], request[ROUTE].action
    assert action is not None, "an open route is not checked"
    if not all(actor.may(action, owner) for owner in owners):
        raise forbidden(actor, request[ROUTE])


def forbidden(actor: Actor, route: AdminRoute) -> PlatformError:
    """Return the error for a caller without the permission of a route."""
    assert route.action is not None, "an open route has no rule"
    roles = [role for role in roles_for(route.action) if role is not actor.role]
    *others, last = roles
    needed = f"the role {', '.join(others)} or {last}" if others else f"the role {last}"
    if actor.tenant_id and actor.reach(route.action):
        needed += ", or publisher of the tenant that it belongs to"
    article = "an" if actor.words[0] in "aeiou" else "a"
    message = f"this needs {needed}; your key is {article} {actor.words}"
    return PlatformError(ErrorCode.PERMISSION_DENIED, message)


async def _idempotency(request: web.Request) -> tuple[str, bytes]:
    """Return the idempotency key and the hash of the request, both empty without a key."""
    given = request.headers.get("Idempotency-Key")
    if given is None:
        return "", b""
    conditions = (request.headers.get("If-Match", ""), request.headers.get("If-None-Match", ""))
    body = await request.read()
    return checked_key(given), fingerprint(request.method, request.path_qs, body, conditions)


def _row(request: web.Request, row_id: str, what: _What, key: str) -> AuditRow:
    actor = request[ACTOR]
    return AuditRow(
        id=row_id,
        actor_id=actor.id,
        actor_role=actor.role,
        action=what.verb,
        kind=what.kind or request[ROUTE].kind,
        object_id=recordable(what.object_id),
        outcome=what.outcome,
        detail=recordable(what.detail),
        before=what.before,
        after=what.after,
        request_id=request[REQUEST_ID],
        idempotency_key=recordable(key),
        actor_name=recordable(actor.name),
    )


def _response(answer: WriteReply | KeptAnswer, *, is_replay: bool) -> web.Response:
    text = answer.body if isinstance(answer, KeptAnswer) else answer.text
    headers: dict[str, str] = {}
    if is_replay:
        headers["Idempotency-Replayed"] = "true"
    if answer.is_secret:
        headers["Cache-Control"] = "no-store"
    if not text:
        return web.Response(status=answer.status, headers=headers)
    if not answer.is_secret:
        headers["ETag"] = etag(json.loads(text))
    return web.Response(
        text=text, status=answer.status, headers=headers, content_type="application/json"
    )
