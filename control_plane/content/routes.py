"""REST of the keys that encrypt the content of tenants. The keys themselves are never shown."""

from typing import Any

from aiohttp import web
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.content import repository
from control_plane.content.model import erased, rotated, shown_keys
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import path_id
from control_plane.http.resources import lock_id
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from control_plane.tables import tenants
from sluice.errors import ErrorCode, PlatformError
from sluice.sealing import Sealer
from sluice.shared_secret import ours
from sluice.stored_content import SEALED_FOR

_KIND = "content-keys"
_KEY = {
    "type": "object",
    "properties": dict.fromkeys(("number", "made_at_unix_ms"), describe.INTEGER),
}
_SHOWN = {
    "type": "object",
    "required": ["id", "keys", "erased_at_unix_ms"],
    "properties": {
        "id": describe.TEXT,
        "keys": {"type": "array", "items": _KEY},
        "erased_at_unix_ms": describe.INTEGER,
    },
}


class ContentKeyRoutes:
    """The request handlers of content keys."""

    def __init__(self, database: Database) -> None:
        self._database, self._writes = database, Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        path, told = "/v1/tenants/{tenant_id:[^/]+}/content-key", describe.operation
        get = told("Show the keys that encrypt a tenant's content", answer=_SHOWN)
        post = told("Encrypt with a new key from now on; older keys still decrypt", answer=_SHOWN)
        delete = told("Erase a tenant's content: its keys at once, its rows soon")
        return [
            AdminRoute("GET", path, self.get, Action.READ_TENANT, _KIND, get),
            AdminRoute("POST", path, self.rotate, Action.WRITE_TENANTS, _KIND, post),
            AdminRoute("DELETE", path, self.erase, Action.WRITE_TENANTS, _KIND, delete),
        ]

    async def get(self, request: web.Request) -> web.Response:
        """Return the numbers and the creation times of a tenant's keys."""
        tenant_id = path_id(request, "tenant_id")
        if not request[ACTOR].may(Action.READ_TENANT, tenant_id):
            raise _not_found(tenant_id)

        async def work(connection: AsyncConnection) -> dict[str, Any]:
            await _require_tenant(connection, tenant_id)
            return _shown(tenant_id, *await repository.keys_of(connection, tenant_id))

        return web.json_response(await self._database.run(work))

    async def rotate(self, request: web.Request) -> web.Response:
        """Add a content key to a tenant, which may be the tenant's first key."""
        tenant_id, sealer = path_id(request, "tenant_id"), Sealer(ours(), SEALED_FOR)

        async def work(write: Write) -> WriteReply:
            keys, erased_at_ms = await _locked(write, tenant_id)
            made = rotated(tenant_id, keys, sealer, repository.now_unix_ms())
            await repository.write_keys(write.connection, tenant_id, made, erased_at_ms)
            before, after = (
                _shown(tenant_id, keys, erased_at_ms),
                _shown(tenant_id, made, erased_at_ms),
            )
            write.record("rotate", tenant_id, before, after, owners=[tenant_id])
            return WriteReply(after, tenant_id)

        return await self._writes.run(request, work)

    async def erase(self, request: web.Request) -> web.Response:
        """Delete all keys of a tenant (204). If there were any, a new key is created."""
        tenant_id, sealer = path_id(request, "tenant_id"), Sealer(ours(), SEALED_FOR)

        async def work(write: Write) -> WriteReply:
            keys, erased_at_ms = await _locked(write, tenant_id)
            now_ms = repository.now_unix_ms()
            made = erased(tenant_id, keys, sealer, now_ms)
            await repository.write_keys(write.connection, tenant_id, made, now_ms)
            before, after = _shown(tenant_id, keys, erased_at_ms), _shown(tenant_id, made, now_ms)
            write.record("erase", tenant_id, before, after, owners=[tenant_id])
            return WriteReply(None, tenant_id, 204)

        return await self._writes.run(request, work)


async def _locked(write: Write, tenant_id: str) -> tuple[list[dict[str, Any]], int]:
    """Return a tenant's keys and the time of its last erasure. The rows stay locked."""
    write.require(tenant_id)
    await write.connection.execute(lock_id(_KIND, tenant_id))
    await _require_tenant(write.connection, tenant_id)
    keys, erased_at_ms = await repository.keys_of(write.connection, tenant_id)
    write.check(_shown(tenant_id, keys, erased_at_ms))
    return keys, erased_at_ms


async def _require_tenant(connection: AsyncConnection, tenant_id: str) -> None:
    query = select(tenants.c.id).where(tenants.c.id == tenant_id)
    if await connection.scalar(query) is None:
        raise _not_found(tenant_id)


def _shown(tenant_id: str, keys: list[dict[str, Any]], erased_at_unix_ms: int) -> dict[str, Any]:
    shown = {"id": tenant_id, "keys": shown_keys(keys)}
    return shown | {"erased_at_unix_ms": erased_at_unix_ms}


def _not_found(tenant_id: str) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no tenants/{tenant_id}")
