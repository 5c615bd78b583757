"""REST of API keys: made, changed, rotated, revoked. The text of a key leaves only once."""

import time
from typing import Any

from aiohttp import web
from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database
from control_plane.http.bodies import path_id, read_body
from control_plane.http.resources import Values, fetch, page
from control_plane.tables import api_keys, tenants
from control_plane.tenants.model import (
    KEY_PREFIX,
    KeyBody,
    NewKey,
    RotationBody,
    expiry_after_grace,
    is_expired,
)
from sluice.errors import ErrorCode, PlatformError
from sluice.ids import new_id, new_secret

_PROPERTIES = tuple(KeyBody.model_fields)


class KeyRoutes:
    """Handlers of keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        keys = "/v1/tenants/{tenant_id:[^/]+}/keys"
        one = keys + "/{id:[^/]+}"
        return [
            web.post(keys, self.create),
            web.get(keys, self.list),
            web.get(one, self.get),
            web.patch(one, self.change),
            web.post(one + "/rotate", self.rotate),
            web.delete(one, self.delete),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """Make a key; its text is in this answer and nowhere else."""
        tenant_id = path_id(request, "tenant_id")
        values = (await read_body(request, KeyBody)).model_dump()
        key = _new_key()

        async def work(connection: AsyncConnection) -> None:
            await _insert(connection, key, tenant_id, values)

        try:
            await self._database.run(work)
        except IntegrityError:
            raise _no_tenant(tenant_id) from None
        return _shown_once(key, tenant_id, values)

    async def list(self, request: web.Request) -> web.Response:
        """Return a tenant's keys, without what is secret."""
        tenant_id = path_id(request, "tenant_id")
        if not await fetch(self._database, select(tenants.c.id).where(tenants.c.id == tenant_id)):
            raise _no_tenant(tenant_id)
        query = select(api_keys).where(api_keys.c.tenant_id == tenant_id)
        return await page(self._database, query, api_keys.c.id, request, _show)

    async def get(self, request: web.Request) -> web.Response:
        """Return one key, without what is secret."""
        rows = await fetch(self._database, select(api_keys).where(*_is_the_key(request)))
        if not rows:
            raise _no_key(request)
        return web.json_response(_show(rows[0]))

    async def change(self, request: web.Request) -> web.Response:
        """Change what the body names, and leave the rest; gateways follow within a second."""
        is_the_key = _is_the_key(request)
        changes = (await read_body(request, KeyBody)).model_dump(exclude_unset=True)

        async def work(connection: AsyncConnection) -> Values | None:
            if changes:
                await connection.execute(update(api_keys).where(*is_the_key).values(changes))
            return await _find(connection, is_the_key)

        row = await self._database.run(work)
        if row is None:
            raise _no_key(request)
        return web.json_response(_show(row))

    async def rotate(self, request: web.Request) -> web.Response:
        """Make a key with the same properties; the old one ends after the grace."""
        is_the_key = _is_the_key(request)
        grace_s = (await read_body(request, RotationBody)).grace_s
        key, now_unix_ms = _new_key(), time.time_ns() // 1_000_000

        async def work(connection: AsyncConnection) -> Values:
            old = await _find(connection, is_the_key)
            if old is None:
                raise _no_key(request)
            expires_at = old["expires_at_unix_ms"]
            if old["is_disabled"] or is_expired(expires_at, now_unix_ms):
                message = f"key {old['id']} is disabled or has expired: make a new one instead"
                raise PlatformError(ErrorCode.CONFLICT, message)
            ends_at = expiry_after_grace(expires_at, now_unix_ms, grace_s)
            end = update(api_keys).where(*is_the_key).values(expires_at_unix_ms=ends_at)
            await connection.execute(end)
            values = {name: old[name] for name in _PROPERTIES}
            await _insert(connection, key, old["tenant_id"], values)
            return old | {"ends_at": ends_at, "values": values}

        done = await self._database.run(work)
        replaced = {"id": done["id"], "expires_at_unix_ms": done["ends_at"]}
        return _shown_once(key, done["tenant_id"], done["values"] | {"replaces": replaced})

    async def delete(self, request: web.Request) -> web.Response:
        """Revoke a key."""
        query = delete(api_keys).where(*_is_the_key(request))

        async def work(connection: AsyncConnection) -> int:
            return (await connection.execute(query)).rowcount

        if not await self._database.run(work):
            raise _no_key(request)
        return web.Response(status=204)


def _new_key() -> NewKey:
    return NewKey(new_id("key"), new_secret(KEY_PREFIX))


async def _insert(connection: AsyncConnection, key: NewKey, tenant_id: str, values: Values) -> None:
    """Store a key; nothing happens when an attempt whose answer got lost has stored it already."""
    row = values | {"id": key.id, "tenant_id": tenant_id, "secret_sha256": key.sha256}
    await connection.execute(insert(api_keys).values(row).on_conflict_do_nothing())


async def _find(connection: AsyncConnection, is_the_key: tuple[Any, Any]) -> Values | None:
    query = select(api_keys).where(*is_the_key).with_for_update()
    row = (await connection.execute(query)).mappings().first()
    return None if row is None else {str(name): value for name, value in row.items()}


def _is_the_key(request: web.Request) -> tuple[Any, Any]:
    tenant_id, key_id = path_id(request, "tenant_id"), path_id(request)
    return (api_keys.c.tenant_id == tenant_id, api_keys.c.id == key_id)


def _show(row: Values) -> Values:
    shown = {name: row[name] for name in ("id", "tenant_id", *_PROPERTIES)}
    return shown | {"created_at": row["created_at"].isoformat()}


def _shown_once(key: NewKey, tenant_id: str, values: Values) -> web.Response:
    shown = {"id": key.id, "key": key.text, "tenant_id": tenant_id} | values
    return web.json_response(shown, status=201, headers={"Cache-Control": "no-store"})


def _no_tenant(tenant_id: str) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no tenants/{tenant_id}")


def _no_key(request: web.Request) -> PlatformError:
    path = "tenants/{tenant_id}/keys/{id}".format(**request.match_info)
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no {path}")
