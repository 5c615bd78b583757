"""Erasing texts: noted before it is done, and noted when it failed."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from control_plane.access.roles import Action, Actor, Role
from control_plane.database import Database
from control_plane.http.routes import ACTOR, ROUTE, AdminRoute
from control_plane.http.writes import WriteReply
from control_plane.telemetry_client import FeedDownError
from control_plane.texts.routes import TextRoutes
from sluice.errors import ErrorCode, PlatformError


class World:
    """Notes what happens, in order: rows of the audit log, and erasures."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.is_away = False
        self.routes = TextRoutes(Database("postgresql+asyncpg://nobody@/nothing"), self)
        self.routes.__dict__["_writes"] = self

    async def find(self, tenant_id: str, request_id: str) -> list[dict[str, Any]]:
        raise AssertionError(tenant_id + request_id)

    async def erase(self, tenant_id: str) -> None:
        self.happened.append(f"erased {tenant_id}")
        if self.is_away:
            raise FeedDownError("away")

    async def run(
        self, _: web.Request, work: Callable[[Any], Awaitable[WriteReply]]
    ) -> web.Response:
        def record(verb: str, object_id: str, *_: object, owners: list[str]) -> None:
            self.happened.append(f"row: {verb} {object_id} of {owners}")

        return web.Response(status=(await work(SimpleNamespace(record=record))).status)

    async def refused(self, _: web.Request, error: PlatformError) -> None:
        self.happened.append(f"row: {error.code}")

    async def delete(self) -> web.Response:
        request = make_mocked_request("DELETE", "/", match_info={"tenant_id": "acme"})
        request[ACTOR] = Actor("k", Role.ADMIN)
        request[ROUTE] = AdminRoute("DELETE", "/", self.routes.delete, Action.WRITE_TENANTS)
        return await self.routes.delete(request)


async def test_an_erasure_is_noted_before_it_is_done() -> None:
    world = World()
    assert (await world.delete()).status == 204
    assert world.happened == ["row: erase acme of ['acme']", "erased acme"]


async def test_an_erasure_that_fails_is_noted_as_well() -> None:
    world = World()
    world.is_away = True
    with pytest.raises(PlatformError) as caught:
        await world.delete()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert world.happened == [
        "row: erase acme of ['acme']",
        "erased acme",
        f"row: {ErrorCode.UNAVAILABLE}",
    ]
