"""REST of keys, which are created, changed, rotated and revoked. A secret is sent only once.

Tenants' keys and admins' keys are handled by the same code. A `KeyKind` describes the differences.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from sqlalchemy import ColumnElement, Table, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from control_plane.access.keys import NewKey, RotationBody, expiry_after_grace, is_expired
from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.fields import AdminBody
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.columns import columns
from control_plane.http.resources import Values, fetch, first, missing_reference, page, shown
from control_plane.http.routes import AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes, require
from sluice.errors import ErrorCode, PlatformError

Conditions = list[ColumnElement[bool]]


@dataclass(frozen=True, slots=True)
class KeyKind:
    """The description of a kind of keys.

    Attributes:
        name: Name of the kind in the path.
        table: Table with `id`, `secret_sha256`, `expires_at_unix_ms`, `is_disabled`, `created_at`.
        fields: Columns that are shown between the id and the creation time.
        body: Request body that creates a key.
        change: Request body with the changeable fields, a subset of `body`.
        new_key: Returns a new key with its secret.
        read: Permission required to read keys.
        write: Permission required to write keys.
        tenants: Table of the tenants that own the keys and are named in the path, or None for keys
            without an owner.
    """

    name: str
    table: Table
    fields: tuple[str, ...]
    body: type[AdminBody]
    change: type[AdminBody]
    new_key: Callable[[], NewKey]
    read: Action
    write: Action
    tenants: Table | None = None

    @property
    def path(self) -> str:
        """The path of the list of keys."""
        if self.tenants is None:
            return f"/v1/{self.name}"
        return f"/v1/tenants/{{tenant_id:[^/]+}}/{self.name}"

    def show(self, row: Values) -> Values:
        """Return the JSON of a key's row, without secrets."""
        visible = {name: "" if row[name] is None else row[name] for name in self.fields}
        return {"id": row["id"]} | visible | {"created_at": row["created_at"].isoformat()}


class KeyRoutes:
    """The request handlers of one kind of keys."""

    def __init__(self, database: Database, kind: KeyKind) -> None:
        self._database = database
        self._writes = Writes(database)
        self._kind = kind

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        kind, one = self._kind, self._kind.path + "/{id:[^/]+}"
        types = columns(kind.table)
        seen = describe.shown(("id", *kind.fields, "created_at"), kind.body, types)
        made = describe.shown(("id", "key", *kind.fields, "created_at"), kind.body, types)
        made["properties"]["key"] = {
            "type": "string",
            "description": "shown only here; a replay by Idempotency-Key is a 409",
        }
        told = describe.operation
        make = told("Make a key", answer=made, status=201, body=kind.body)
        change = told("Change the given fields of a key", answer=seen, body=kind.change)
        summary = "Make a key like this one, which ends after a grace"
        rotate = told(summary, answer=_replacing(made), status=201, body=RotationBody)
        read, write, name = kind.read, kind.write, kind.name
        return [
            AdminRoute("POST", kind.path, self.create, write, name, make),
            AdminRoute(
                "GET", kind.path, self.list, read, name, describe.listing("List keys", seen)
            ),
            AdminRoute("GET", one, self.get, read, name, told("Show a key", answer=seen)),
            AdminRoute("PATCH", one, self.change, write, name, change),
            AdminRoute("POST", one + "/rotate", self.rotate, write, name, rotate),
            AdminRoute("DELETE", one, self.delete, write, name, told("Revoke a key")),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """Create a key. Only this answer contains the secret."""
        scope = self._scope(request)
        values = (await read_body(request, self._kind.body)).model_dump() | scope
        key = self._kind.new_key()

        async def work(write: Write) -> WriteReply:
            after = await self._insert(write, key, values)
            return WriteReply({"key": key.text} | after, key.id, 201, is_secret=True)

        try:
            return await self._writes.run(request, work)
        except IntegrityError as error:
            raise (_no_tenant(scope) if scope else missing_reference(error)) from None

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of keys, without secrets."""
        scope, kind = self._scope(request), self._kind
        if kind.tenants is not None:
            query = select(kind.tenants.c.id).where(kind.tenants.c.id == scope["tenant_id"])
            if not await fetch(self._database, query):
                raise _no_tenant(scope)
        query = select(kind.table).where(*self._is_in(scope))
        return await page(self._database, query, kind.table.c.id, request, kind.show)

    async def get(self, request: web.Request) -> web.Response:
        """Return one key, without secrets."""
        rows = await fetch(self._database, select(self._kind.table).where(*self._is_it(request)))
        if not rows:
            raise _no_key(request)
        return shown(request, self._kind.show(rows[0]))

    async def change(self, request: web.Request) -> web.Response:
        """Change only the fields that are in the body."""
        is_it = self._is_it(request)
        changes = (await read_body(request, self._kind.change)).model_dump(exclude_unset=True)

        async def work(write: Write) -> WriteReply:
            before = await self._locked(write, is_it)
            after = await self._update(write, before, changes)
            key_id = str(after["id"])
            write.record("change", key_id, self._kind.show(before), after, owners=_owners(before))
            return WriteReply(after, key_id)

        return await self._writes.run(request, work)

    async def rotate(self, request: web.Request) -> web.Response:
        """Create a key with the same properties. The old key expires after the grace period."""
        is_it, kind = self._is_it(request), self._kind
        grace_s = (await read_body(request, RotationBody)).grace_s
        key, now_unix_ms = kind.new_key(), time.time_ns() // 1_000_000

        async def work(write: Write) -> WriteReply:
            old = await self._locked(write, is_it)
            expires_at = old["expires_at_unix_ms"]
            if old["is_disabled"] or is_expired(expires_at, now_unix_ms):
                message = f"key {old['id']} is disabled or has expired: make a new one instead"
                raise PlatformError(ErrorCode.CONFLICT, message)
            ends_at = expiry_after_grace(expires_at, now_unix_ms, grace_s)
            ended = await self._update(write, old, {"expires_at_unix_ms": ends_at})
            owners = _owners(old)
            write.record("rotate", old["id"], kind.show(old), ended, owners=owners)
            after = await self._insert(write, key, {name: old[name] for name in kind.fields})
            replaced = {"id": old["id"], "expires_at_unix_ms": ends_at}
            body = {"key": key.text} | after | {"replaces": replaced}
            return WriteReply(body, key.id, 201, is_secret=True)

        return await self._writes.run(request, work)

    async def delete(self, request: web.Request) -> web.Response:
        """Revoke a key."""
        is_it = self._is_it(request)

        async def work(write: Write) -> WriteReply:
            row = await self._locked(write, is_it)
            write.record("revoke", row["id"], self._kind.show(row), None, owners=_owners(row))
            await write.connection.execute(delete(self._kind.table).where(*is_it))
            return WriteReply(None, row["id"], 204)

        return await self._writes.run(request, work)

    async def _insert(self, write: Write, key: NewKey, values: Values) -> Values:
        """Store a new key, and return its JSON."""
        row = values | {"id": key.id, "secret_sha256": key.sha256}
        query = insert(self._kind.table).values(row).returning(self._kind.table)
        made = (await write.connection.execute(query)).mappings().one()
        after = self._kind.show({str(name): value for name, value in made.items()})
        write.record("create", key.id, None, after, owners=_owners(values))
        return after

    async def _locked(self, write: Write, is_it: Conditions) -> Values:
        """Return a key's row, locked, after a check of the request's conditional headers."""
        query = select(self._kind.table).where(*is_it).with_for_update()
        row = await first(write.connection, query)
        if row is None:
            raise _no_key(write.request)
        write.check(self._kind.show(row))
        return row

    async def _update(self, write: Write, row: Values, changes: Values) -> Values:
        """Change the row of a key, and return its JSON."""
        if changes:
            table = self._kind.table
            query = update(table).where(table.c.id == row["id"]).values(changes)
            await write.connection.execute(query)
        return self._kind.show(row | changes)

    def _scope(self, request: web.Request) -> Values:
        """Return the owner of the requested keys. Raises 403 if the caller may not access them."""
        if self._kind.tenants is None:
            return {}
        tenant_id = path_id(request, "tenant_id")
        require(request, tenant_id)
        return {"tenant_id": tenant_id}

    def _is_in(self, scope: Values) -> Conditions:
        return [self._kind.table.c[name] == value for name, value in scope.items()]

    def _is_it(self, request: web.Request) -> Conditions:
        return [*self._is_in(self._scope(request)), self._kind.table.c.id == path_id(request)]


def _replacing(made: Values) -> Values:
    """Return the schema of a key that replaces another key, with the replaced key's id."""
    types = {"expires_at_unix_ms": describe.INTEGER}
    replaced = describe.shown(("id", "expires_at_unix_ms"), types=types)
    return made | {
        "required": [*made["required"], "replaces"],
        "properties": made["properties"] | {"replaces": replaced},
    }


def _owners(values: Values) -> list[Any]:
    return [values.get("tenant_id")]


def _no_tenant(scope: Values) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no tenants/{scope['tenant_id']}")


def _no_key(request: web.Request) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no {request.path.removeprefix('/v1/')}")
