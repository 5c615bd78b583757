"""Rows as REST resources, which can be created, replaced, read, listed and deleted.

The code is common to all kinds. A `Resource` describes the table, the body, the shown columns, the
owner of a row and further steps of a write. PUT is idempotent. A write of the present values
changes nothing, and watchers receive no message.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from sqlalchemy import Column, ColumnElement, Select, Table, delete, func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action, Reach
from control_plane.database import Database
from control_plane.fields import AdminBody, checked_id
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.columns import columns
from control_plane.http.etags import etag, is_known
from control_plane.http.routes import ACTOR, ROUTE, AdminRoute
from control_plane.http.writes import RECORDED, Write, WriteReply, Writes
from control_plane.percent import ShareField
from sluice.errors import BadRequestError, ErrorCode, PlatformError

# Advisory lock per id, which a write holds because a missing object has no row to lock.
_LOCKS = 731053

Values = dict[str, Any]
Hook = Callable[[AsyncConnection, str, Values], Awaitable[None]]
Owners = list[str | None]
DeleteHook = Callable[[AsyncConnection, str], Awaitable[None]]


async def no_check(connection: AsyncConnection, key: str, values: Values) -> None:
    """Accept every write without any change, for a resource that has no check."""


def in_turn(*hooks: Hook) -> Hook:
    """Return a hook that runs several hooks, one after the other."""

    async def run(connection: AsyncConnection, key: str, values: Values) -> None:
        for hook in hooks:
            await hook(connection, key, values)

    return run


async def _no_check(connection: AsyncConnection, key: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Resource:
    """The description of a kind of resource.

    Attributes:
        path: Path of the list, below /v1/.
        table: Table with the rows of the resource.
        shown: Columns that an answer contains.
        read: Permission required to read.
        write: Permission required to write.
        owner: SQL expression of a row's tenant, which is NULL for a public row. If None, rows of
            this kind have no owner.
        body: Request body of a PUT, or None if only the platform writes the rows.
        on_create: Returns the values of a new row that are not in the body. A replacement does not
            change them.
        before_write: Checks a write in its transaction. It raises the error for the caller, and may
            complete the values.
        after_write: Makes further changes in the transaction of a write.
        is_removable: Whether DELETE exists. A resource with a body always has DELETE.
        before_delete: Checks a deletion in its transaction.
        filters: Columns that filter a list as `?column=value`.
        id_pattern: Pattern of the id in the path. Only public model names may contain slashes.
        id_check: Returns a valid id. Otherwise it raises ValueError with the expected form.
        shares: Columns that are shown as percentages in bodies and answers.
        hidden: Columns with lists of which the audit log records only the lengths, because some
            roles may read the audit log but not these lists.
        body_bytes_max: Largest size of a PUT body in bytes, or 0 for the default limit.
    """

    path: str
    table: Table
    shown: tuple[str, ...]
    read: Action
    write: Action
    owner: ColumnElement[Any] | None = None
    body: type[AdminBody] | None = None
    on_create: Callable[[], Values] = dict
    before_write: Hook = no_check
    after_write: Hook = no_check
    is_removable: bool = False
    before_delete: DeleteHook = _no_check
    filters: tuple[str, ...] = ()
    id_pattern: str = "[^/]+"
    id_check: Callable[[str], str] = checked_id
    hidden: tuple[str, ...] = ()
    body_bytes_max: int = 0
    shares: tuple[ShareField, ...] = ()

    @property
    def key(self) -> Column[str]:
        """The primary key column of the table."""
        return next(iter(self.table.primary_key.columns))

    def stored(self, values: Values) -> Values:
        """Return a body's values in stored form.

        An empty string becomes NULL in nullable columns.
        """
        columns = self.table.columns
        for share in self.shares:
            values = {**values, share.stored: share.read(values[share.shown])}
            del values[share.shown]
        return {
            name: None if value == "" and columns[name].nullable else value
            for name, value in values.items()
        }

    def show(self, row: Mapping[str, Any]) -> Values:
        """Return the JSON of a row. NULL becomes the empty string."""
        row = {**row, **{share.shown: share.show(row[share.stored]) for share in self.shares}}
        return {name: "" if row[name] is None else row[name] for name in self.shown}

    def noted(self, shown: Values) -> Values:
        """Return the JSON of a row in the form for the audit log."""
        return {name: len(it) if name in self.hidden else it for name, it in shown.items()}

    def select(self) -> Select[Any]:
        """Return the query of all rows, each with its `owner`."""
        if self.owner is None:
            return select(self.table)
        return select(self.table, self.owner.label("owner"))


class ResourceRoutes:
    """The request handlers of one resource."""

    def __init__(self, database: Database, resource: Resource) -> None:
        self._database = database
        self._writes = Writes(database)
        self._resource = resource

    def routes(self) -> list[AdminRoute]:
        """Return the routes.

        Every resource can be read. A resource with a body can also be written.
        """
        kind = self._resource
        every = f"/v1/{kind.path}"
        one = f"{every}/{{{kind.key.name}:{kind.id_pattern}}}"
        types = columns(kind.table, is_null_shown=False)
        shown = describe.shown(kind.shown, kind.body, types)
        listing = describe.listing(f"List {kind.path}", shown, kind.filters)
        get = describe.operation(f"Show one of {kind.path}", answer=shown)
        found = [
            AdminRoute("GET", every, self.list, kind.read, kind.path, listing),
            AdminRoute("GET", one, self.get, kind.read, kind.path, get),
        ]
        if kind.body is not None:
            summary = f"Create (201) or replace (200) one of {kind.path}"
            put = describe.operation(summary, answer=shown, body=kind.body, also=(201,))
            found.append(AdminRoute("PUT", one, self.put, kind.write, kind.path, put))
        if kind.body is not None or kind.is_removable:
            remove = describe.operation(f"Delete one of {kind.path}")
            found.append(AdminRoute("DELETE", one, self.delete, kind.write, kind.path, remove))
        return found

    async def put(self, request: web.Request) -> web.Response:
        """Create (201) or replace (200) an object."""
        resource = self._resource
        assert resource.body is not None
        key, large = self._key(request), request
        if resource.body_bytes_max:
            large = request.clone(client_max_size=resource.body_bytes_max)
        given = resource.stored((await read_body(large, resource.body)).model_dump())

        async def work(write: Write) -> WriteReply:
            values, connection = dict(given), write.connection
            before = await self._locked(write, key)
            owners = self._owners(write, key, before, values)
            write.require(*owners)
            write.check(None if before is None else resource.show(before))
            await resource.before_write(connection, key, values)
            created = {resource.key.name: key} | resource.on_create() | values
            query = (
                insert(resource.table)
                .values(created)
                .on_conflict_do_update(index_elements=[resource.key], set_=values)
                .returning(resource.table)
            )
            row = (await connection.execute(query)).mappings().one()
            await resource.after_write(connection, key, values)
            after = resource.show({str(name): value for name, value in row.items()})
            if before is None:
                write.record("create", key, None, resource.noted(after), owners=owners)
                return WriteReply(after, key, 201)
            was, now = resource.noted(resource.show(before)), resource.noted(after)
            write.record("replace", key, was, now, owners=owners)
            return WriteReply(after, key)

        try:
            answer = await self._writes.run(large, work)
        except IntegrityError as error:
            raise missing_reference(error) from None
        if large is not request:
            request[RECORDED] = large[RECORDED]
        return answer

    async def get(self, request: web.Request) -> web.Response:
        """Return one object."""
        key = self._key(request)
        rows = await fetch(self._database, self._resource.select().where(self._resource.key == key))
        if not (rows and request[ACTOR].may(self._resource.read, rows[0].get("owner"))):
            raise self._not_found(key)
        return shown(request, self._resource.show(rows[0]))

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of objects."""
        query = self._resource.select()
        for name in self._resource.filters:
            if (wanted := request.query.get(name)) is not None:
                query = query.where(self._resource.table.c[name] == wanted.replace("\0", ""))
        if self._resource.owner is not None:
            query = visible(request, query, self._resource.owner)
        return await page(self._database, query, self._resource.key, request, self._resource.show)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one object (204), or refuse with 409 while other objects refer to it."""
        resource, key = self._resource, self._key(request)

        async def work(write: Write) -> WriteReply:
            query = resource.select().where(resource.key == key)
            row = await first(write.connection, query)
            if row is None or not write.actor.may(resource.read, row.get("owner")):
                raise self._not_found(key)
            await resource.before_delete(write.connection, key)
            row = await self._locked(write, key)
            if row is None:
                raise self._not_found(key)
            before = resource.show(row)
            write.check(before)
            was = resource.noted(before)
            write.record("delete", key, was, None, owners=[row.get("owner")])
            await write.connection.execute(delete(resource.table).where(resource.key == key))
            return WriteReply(None, key, 204)

        try:
            return await self._writes.run(request, work)
        except IntegrityError as error:
            user = getattr(_cause(error), "table_name", None) or "something"
            message = f"{resource.path}/{key} is still used by {user}: delete them first"
            raise PlatformError(ErrorCode.CONFLICT, message) from None

    async def _locked(self, write: Write, key: str) -> Values | None:
        """Lock an id and its row until the transaction ends, and return the row, or None."""
        resource = self._resource
        await write.connection.execute(lock_id(resource.path, key))
        query = resource.select().where(resource.key == key)
        # This lock mode permits other transactions to insert rows that refer to the row.
        locked = query.with_for_update(of=resource.table, key_share=True)
        return await first(write.connection, locked)

    def _owners(self, write: Write, key: str, before: Values | None, values: Values) -> Owners:
        """Return the owners of an object before and after a write.

        A publisher's new name must begin with the name of its tenant. So an object of another
        tenant is refused in the same way as an object that does not exist.
        """
        tenant_id = write.actor.tenant_id
        is_its_own = before is not None and before.get("owner") == tenant_id
        if tenant_id and not is_its_own and not key.startswith(f"{tenant_id}/"):
            message = f"id: new names of a publisher of {tenant_id} begin with {tenant_id}/"
            raise PlatformError(ErrorCode.PERMISSION_DENIED, message, param="id")
        owner = values.get("owner_tenant_id")
        return [owner] if before is None else [before.get("owner"), owner]

    def _key(self, request: web.Request) -> str:
        return path_id(request, self._resource.key.name, self._resource.id_check)

    def _not_found(self, key: str) -> PlatformError:
        return PlatformError(ErrorCode.NOT_FOUND, f"there is no {self._resource.path}/{key}")


def shown(request: web.Request, body: Values) -> web.Response:
    """Return the answer of a GET with its ETag, or 304 if the client has the same version."""
    headers = {"ETag": etag(body)}
    if is_known(request.headers, headers["ETag"]):
        return web.Response(status=304, headers=headers)
    return web.json_response(body, headers=headers)


def visible(request: web.Request, query: Select[Any], owner: ColumnElement[Any]) -> Select[Any]:
    """Return a query restricted to the rows that the caller may read.

    Args:
        request: Request of a declared route that reads.
        query: Query of all rows.
        owner: SQL expression of a row's tenant, which is NULL for a public row.
    """
    actor, action = request[ACTOR], request[ROUTE].action
    assert action is not None, "what is open to all has no owners"
    match actor.reach(action):
        case Reach.ALL:
            return query
        case Reach.OWN_AND_PUBLIC:
            return query.where(or_(owner.is_(None), owner == actor.tenant_id))
        case _:
            return query.where(owner == actor.tenant_id)


def lock_id(kind: str, key: str) -> Select[Any]:
    """Return the query that locks an id until the transaction ends, even if there is no row."""
    return select(func.pg_advisory_xact_lock(_LOCKS, func.hashtext(f"{kind}/{key}")))


async def first(connection: AsyncConnection, query: Select[Any]) -> Values | None:
    """Return the first row of a query, or None if there is no row."""
    row = (await connection.execute(query)).mappings().first()
    return None if row is None else {str(name): value for name, value in row.items()}


async def fetch(database: Database, query: Select[Any]) -> list[Values]:
    """Return the rows of a query."""

    async def work(connection: AsyncConnection) -> list[Values]:
        rows = (await connection.execute(query)).mappings()
        return [{str(name): value for name, value in row.items()} for row in rows]

    return await database.run(work)


def page_of(request: web.Request) -> tuple[int, str]:
    """Return the requested page size, and the last id of the previous page.

    Raises:
        BadRequestError: The size is not a valid number.
    """
    text = request.query.get("limit", str(describe.PAGE_MAX))
    if not (re.fullmatch(r"[0-9]{1,9}", text) and 1 <= int(text) <= describe.PAGE_MAX):
        message = f"limit must be a number from 1 to {describe.PAGE_MAX}"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="limit")
    return int(text), request.query.get("after", "").replace("\0", "")


async def page(
    database: Database,
    query: Select[Any],
    key: ColumnElement[str],
    request: web.Request,
    show: Callable[[Values], Values],
    *,
    newest_first: bool = False,
) -> web.Response:
    """Return a page of rows in the order of ids, with `?limit=` rows after the id `?after=`."""
    limit, after = page_of(request)
    if newest_first:
        query = (query.where(key < after) if after else query).order_by(key.desc())
    else:
        query = query.where(key > after).order_by(key)
    rows = await fetch(database, query.limit(limit + 1))
    data = [show(row) for row in rows[:limit]]
    return shown(request, {"data": data, "has_more": len(rows) > limit})


def missing_reference(error: IntegrityError) -> PlatformError:
    """Return the error for a reference to an object that does not exist."""
    constraint = getattr(_cause(error), "constraint_name", None) or ""
    table = getattr(_cause(error), "table_name", None) or ""
    field = constraint.removeprefix(f"fk_{table}_")
    if not constraint.startswith("fk_"):
        return PlatformError(ErrorCode.CONFLICT, f"this contradicts {constraint or 'other rows'}")
    message = f"{field}: this object does not exist; create it first"
    return BadRequestError(ErrorCode.INVALID_REQUEST, message, param=field)


def _cause(error: IntegrityError) -> BaseException | None:
    """Return the error of asyncpg itself, which names the violated constraint."""
    return error.orig.__cause__ if error.orig is not None else None
