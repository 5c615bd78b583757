"""Rows as REST resources: create-or-replace, read, list and delete, the same for every kind.

A `Resource` says what differs: the table, the body, which columns are shown and what else a write
has to do. PUT is idempotent; writing what is there already changes nothing and tells no watcher.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from sqlalchemy import Column, Select, Table, delete, literal_column, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database
from control_plane.fields import Body, checked_id
from control_plane.http.bodies import path_id, read_body
from sluice.errors import BadRequestError, ErrorCode, PlatformError

PAGE_MAX = 1000

Values = dict[str, Any]
Hook = Callable[[AsyncConnection, str, Values], Awaitable[None]]
DeleteHook = Callable[[AsyncConnection, str], Awaitable[None]]


async def _nothing(connection: AsyncConnection, key: str, values: Values) -> None:
    pass


async def _no_check(connection: AsyncConnection, key: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of resource.

    Attributes:
        path: Below /v1/.
        table: Its rows.
        shown: Columns of an answer.
        body: What PUT takes; None for what only we write.
        on_create: Values of a new row that the body does not hold and a replacement keeps.
        before_write: Checks in the same transaction; raises what the caller shall see. It may
            complete the values.
        after_write: What else belongs to a write.
        is_removable: Whether there is a DELETE; there is with every body.
        before_delete: Checks in the same transaction.
        filters: Columns that a list may be narrowed by, as `?column=value`.
        id_pattern: Of the path; only public model names may hold slashes.
        id_check: Returns an id that may be one; ValueError says what is expected.
    """

    path: str
    table: Table
    shown: tuple[str, ...]
    body: type[Body] | None = None
    on_create: Callable[[], Values] = dict
    before_write: Hook = _nothing
    after_write: Hook = _nothing
    is_removable: bool = False
    before_delete: DeleteHook = _no_check
    filters: tuple[str, ...] = ()
    id_pattern: str = "[^/]+"
    id_check: Callable[[str], str] = checked_id

    @property
    def key(self) -> Column[str]:
        """The primary key."""
        return next(iter(self.table.primary_key.columns))

    def stored(self, values: Values) -> Values:
        """Return what a row holds of a body: NULL for the empty string where it stands for that."""
        columns = self.table.columns
        return {
            name: None if value == "" and columns[name].nullable else value
            for name, value in values.items()
        }

    def show(self, row: Mapping[str, Any]) -> Values:
        """Return the JSON of a row; NULL is shown as the empty string that stands for it."""
        return {name: "" if row[name] is None else row[name] for name in self.shown}


class ResourceRoutes:
    """The handlers of one resource."""

    def __init__(self, database: Database, resource: Resource) -> None:
        self._database = database
        self._resource = resource

    def routes(self) -> list[web.RouteDef]:
        """Return the routes; reading comes with every resource, writing with a body."""
        every = f"/v1/{self._resource.path}"
        one = f"{every}/{{{self._resource.key.name}:{self._resource.id_pattern}}}"
        found = [web.get(every, self.list), web.get(one, self.get)]
        if self._resource.body is not None:
            found.append(web.put(one, self.put))
        if self._resource.body is not None or self._resource.is_removable:
            found.append(web.delete(one, self.delete))
        return found

    async def put(self, request: web.Request) -> web.Response:
        """Create (201) or replace (200)."""
        resource = self._resource
        assert resource.body is not None
        key = self._key(request)
        values = resource.stored((await read_body(request, resource.body)).model_dump())

        async def work(connection: AsyncConnection) -> tuple[Values, bool]:
            await resource.before_write(connection, key, values)
            created = {resource.key.name: key} | resource.on_create() | values
            query = (
                insert(resource.table)
                .values(created)
                .on_conflict_do_update(index_elements=[resource.key], set_=values)
                # xmax is who replaced or locked a row version: 0 in a fresh one.
                .returning(resource.table, literal_column("xmax = 0").label("is_new"))
            )
            row = (await connection.execute(query)).mappings().one()
            await resource.after_write(connection, key, values)
            return resource.show({str(name): value for name, value in row.items()}), row["is_new"]

        try:
            shown, is_new = await self._database.run(work)
        except IntegrityError as error:
            raise missing_reference(error) from None
        return web.json_response(shown, status=201 if is_new else 200)

    async def get(self, request: web.Request) -> web.Response:
        """Return one."""
        key = self._key(request)
        query = select(self._resource.table).where(self._resource.key == key)
        rows = await fetch(self._database, query)
        if not rows:
            raise self._not_found(key)
        return web.json_response(self._resource.show(rows[0]))

    async def list(self, request: web.Request) -> web.Response:
        """Return a page."""
        query = select(self._resource.table)
        for name in self._resource.filters:
            if (wanted := request.query.get(name)) is not None:
                query = query.where(self._resource.table.c[name] == wanted.replace("\0", ""))
        return await page(self._database, query, self._resource.key, request, self._resource.show)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one (204); 409 while something refers to it."""
        key = self._key(request)
        query = delete(self._resource.table).where(self._resource.key == key)

        async def work(connection: AsyncConnection) -> int:
            await self._resource.before_delete(connection, key)
            return (await connection.execute(query)).rowcount

        try:
            if not await self._database.run(work):
                raise self._not_found(key)
        except IntegrityError as error:
            user = getattr(_cause(error), "table_name", None) or "something"
            message = f"{self._resource.path}/{key} is still used by {user}: delete those first"
            raise PlatformError(ErrorCode.CONFLICT, message) from None
        return web.Response(status=204)

    def _key(self, request: web.Request) -> str:
        return path_id(request, self._resource.key.name, self._resource.id_check)

    def _not_found(self, key: str) -> PlatformError:
        return PlatformError(ErrorCode.NOT_FOUND, f"there is no {self._resource.path}/{key}")


async def fetch(database: Database, query: Select[Any]) -> list[Values]:
    """Return the rows of a query."""

    async def work(connection: AsyncConnection) -> list[Values]:
        rows = (await connection.execute(query)).mappings()
        return [{str(name): value for name, value in row.items()} for row in rows]

    return await database.run(work)


async def page(
    database: Database,
    query: Select[Any],
    key: Column[str],
    request: web.Request,
    show: Callable[[Values], Values],
) -> web.Response:
    """Return rows in the order of ids: `?limit=` of them, `?after=` the last id of a page."""
    text = request.query.get("limit", str(PAGE_MAX))
    if not (re.fullmatch(r"[0-9]{1,9}", text) and 1 <= int(text) <= PAGE_MAX):
        message = f"limit must be a number from 1 to {PAGE_MAX}"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="limit")
    limit = int(text)
    after = request.query.get("after", "").replace("\0", "")
    rows = await fetch(database, query.where(key > after).order_by(key).limit(limit + 1))
    data = [show(row) for row in rows[:limit]]
    return web.json_response({"data": data, "has_more": len(rows) > limit})


def missing_reference(error: IntegrityError) -> PlatformError:
    """Return what to say about a reference to something that is not there."""
    constraint = getattr(_cause(error), "constraint_name", None) or ""
    table = getattr(_cause(error), "table_name", None) or ""
    field = constraint.removeprefix(f"fk_{table}_")
    if not constraint.startswith("fk_"):
        return PlatformError(ErrorCode.CONFLICT, f"this contradicts {constraint or 'other rows'}")
    message = f"{field}: there is no such object; create it first"
    return BadRequestError(ErrorCode.INVALID_REQUEST, message, param=field)


def _cause(error: IntegrityError) -> BaseException | None:
    """Return asyncpg's own error, which names the constraint."""
    return error.orig.__cause__ if error.orig is not None else None
