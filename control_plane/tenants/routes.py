"""REST of tiers, tenants and keys."""

import secrets
from typing import Any

from aiohttp import web
from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database
from control_plane.http.bodies import path_id, read_body
from control_plane.http.resources import Resource, ResourceRoutes, Values, fetch, page
from control_plane.tables import api_keys, tenants, tiers
from control_plane.tenants.model import (
    KEY_PREFIX,
    RESERVED_PERMILLE_MAX,
    SALT_BYTES,
    KeyBody,
    NewKey,
    TenantBody,
    TierBody,
)
from sluice.errors import ErrorCode, PlatformError
from sluice.ids import new_id, new_secret

_RESERVES_LOCK = 7310520304  # held while the reserved shares of all tiers are added up


async def _check_reserves(connection: AsyncConnection, key: str, values: Values) -> None:
    """Refuse a reserved share that the other tiers leave no room for."""
    wanted = values["reserved_permille"]
    if not wanted:
        return
    await connection.execute(select(func.pg_advisory_xact_lock(_RESERVES_LOCK)))
    query = select(func.coalesce(func.sum(tiers.c.reserved_permille), 0)).where(tiers.c.id != key)
    others = int(await connection.scalar(query) or 0)
    if others + wanted > RESERVED_PERMILLE_MAX:
        message = (
            f"reserved_permille: the other tiers have {others} of {RESERVED_PERMILLE_MAX}, so tier"
            f" {key} can have {RESERVED_PERMILLE_MAX - others}, not {wanted}; lower theirs first"
        )
        raise PlatformError(ErrorCode.CONFLICT, message, param="reserved_permille")


TIERS = Resource(
    path="tiers",
    table=tiers,
    shown=("id", *TierBody.model_fields),
    body=TierBody,
    before_write=_check_reserves,
)
TENANTS = Resource(
    path="tenants",
    table=tenants,
    shown=("id", *TenantBody.model_fields),
    body=TenantBody,
    on_create=lambda: {"cache_salt": secrets.token_bytes(SALT_BYTES)},
)


class TenantRoutes:
    """Handlers of tiers, tenants and keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        keys = "/v1/tenants/{tenant_id:[^/]+}/keys"
        one = keys + "/{id:[^/]+}"
        return [
            web.post(keys, self.create_key),
            web.get(keys, self.list_keys),
            web.get(one, self.get_key),
            web.delete(one, self.delete_key),
            *ResourceRoutes(self._database, TIERS).routes(),
            *ResourceRoutes(self._database, TENANTS).routes(),
        ]

    async def create_key(self, request: web.Request) -> web.Response:
        """Make a key; its text is in this answer and nowhere else."""
        tenant_id = path_id(request, "tenant_id")
        body = await read_body(request, KeyBody)
        key = NewKey(new_id("key"), new_secret(KEY_PREFIX))
        values = {"id": key.id, "tenant_id": tenant_id, "secret_sha256": key.sha256}
        # Nothing happens when an attempt whose answer got lost had made it already.
        query = insert(api_keys).values(values | body.model_dump()).on_conflict_do_nothing()

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(query)

        try:
            await self._database.run(work)
        except IntegrityError:
            raise _no_tenant(tenant_id) from None
        shown = {"id": key.id, "key": key.text, "tenant_id": tenant_id} | body.model_dump()
        return web.json_response(shown, status=201, headers={"Cache-Control": "no-store"})

    async def list_keys(self, request: web.Request) -> web.Response:
        """Return a tenant's keys, without what is secret."""
        tenant_id = path_id(request, "tenant_id")
        if not await fetch(self._database, select(tenants.c.id).where(tenants.c.id == tenant_id)):
            raise _no_tenant(tenant_id)
        query = select(api_keys).where(api_keys.c.tenant_id == tenant_id)
        return await page(self._database, query, api_keys.c.id, request, _show)

    async def get_key(self, request: web.Request) -> web.Response:
        """Return one key, without what is secret."""
        rows = await fetch(self._database, select(api_keys).where(*_is_the_key(request)))
        if not rows:
            raise _no_key(request)
        return web.json_response(_show(rows[0]))

    async def delete_key(self, request: web.Request) -> web.Response:
        """Revoke a key."""
        query = delete(api_keys).where(*_is_the_key(request))

        async def work(connection: AsyncConnection) -> int:
            return (await connection.execute(query)).rowcount

        if not await self._database.run(work):
            raise _no_key(request)
        return web.Response(status=204)


def _is_the_key(request: web.Request) -> tuple[Any, Any]:
    tenant_id, key_id = path_id(request, "tenant_id"), path_id(request)
    return (api_keys.c.tenant_id == tenant_id, api_keys.c.id == key_id)


def _show(row: Values) -> Values:
    names = ("id", "tenant_id", "expires_at_unix_ms", "is_disabled", "rpm", "tpm")
    return {name: row[name] for name in names} | {"created_at": row["created_at"].isoformat()}


def _no_tenant(tenant_id: str) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no tenants/{tenant_id}")


def _no_key(request: web.Request) -> PlatformError:
    path = "tenants/{tenant_id}/keys/{id}".format(**request.match_info)
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no {path}")
