"""What options of admin commands mean, what the audit log says, and edits that race."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import typer

from cli.admin_key_commands import RoleName
from cli.api import ApiClient, ApiError
from cli.audit_commands import changed, since_moment
from cli.tier_commands import model_limits
from control_plane.access.roles import Role

NOW = datetime(2030, 1, 2, tzinfo=UTC)


def test_limits_of_models() -> None:
    assert model_limits(["m rpm=1 tpm=2", "org/n"]) == {"m": {"rpm": 1, "tpm": 2}, "org/n": {}}
    for wrong in ("", "m rpm", "m rpm=-1", "m rps=1", "m rpm=x"):
        with pytest.raises(typer.BadParameter):
            model_limits([wrong])


def test_moments() -> None:
    assert since_moment("1d", NOW) == "2030-01-01T00:00:00+00:00"
    assert since_moment("2030-01-01", NOW) == "2030-01-01T00:00:00+00:00"
    assert since_moment("2030-01-01T00:00:00+01:00", NOW) == "2030-01-01T00:00:00+01:00"
    with pytest.raises(typer.BadParameter):
        since_moment("1w", NOW)


def test_a_write_is_shown_as_its_changes() -> None:
    row = {"outcome": "done", "detail": "", "before": {"a": 1, "b": 2}, "after": {"a": 1, "b": 3}}
    assert changed(row) == "b: 2 -> 3"
    assert changed(row | {"before": None}) == ""
    assert changed(row | {"outcome": "conflict", "detail": "no"}) == "no"


def test_the_roles_equal_the_roles_of_the_control_plane() -> None:
    assert [role.value for role in RoleName] == [role.value for role in Role]


class Rival:
    """A server with one tier, which somebody else writes between each read and write."""

    def __init__(self, rival_writes: int) -> None:
        self.rpm, self.tpm, self.left = 0, 0, rival_writes

    def __call__(self, request: httpx.Request) -> httpx.Response:
        tag = f'"{self.rpm}-{self.tpm}"'
        tier = {"id": "t", "rpm": self.rpm, "tpm": self.tpm}
        if request.method == "GET":
            if self.left:
                self.left -= 1
                self.rpm += 1
            return httpx.Response(200, json=tier, headers={"ETag": tag})
        if request.headers["If-Match"] != tag:
            return httpx.Response(412, json={"detail": "read it again"})
        self.tpm = 7
        return httpx.Response(200, json=tier | {"tpm": 7})


@asynccontextmanager
async def served(server: Callable[[httpx.Request], httpx.Response]) -> AsyncIterator[ApiClient]:
    async with ApiClient("http://127.0.0.1:1", "key") as api:
        transport = httpx.MockTransport(server)
        api._http = httpx.AsyncClient(base_url="http://127.0.0.1:1", transport=transport)
        yield api


async def edited(rival: Rival) -> dict[str, object]:
    async with served(rival) as api:
        return await api.edit("/v1/tiers/t", lambda known: known | {"tpm": 7})


async def test_no_other_change_is_overwritten() -> None:
    rival = Rival(3)
    assert await edited(rival) == {"id": "t", "rpm": 3, "tpm": 7}


async def test_a_writer_that_is_always_too_late_gives_up() -> None:
    with pytest.raises(ApiError, match="412 read it again"):
        await edited(Rival(100))


class Dies:
    """A server that ends before it answers, so many times."""

    def __init__(self, deaths: int, error: type[httpx.TransportError]) -> None:
        self.left, self.error = deaths, error
        self.keys: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("idempotency-key"))
        self.left -= 1
        if self.left >= 0:
            raise self.error("gone")
        return httpx.Response(201, json={"id": "k"})


async def test_a_write_with_a_lost_answer_is_repeated_under_one_key() -> None:
    server = Dies(1, httpx.ReadError)
    async with served(server) as api:
        assert await api.call("POST", "/v1/admin-keys", {}) == {"id": "k"}
        first, second = server.keys
        assert first == second
        await api.call("POST", "/v1/admin-keys", {})
        await api.call("GET", "/v1/admin-keys")
        assert server.keys[2] not in (first, None), "another write has another key"
        assert server.keys[3] is None


@pytest.mark.parametrize(
    ("deaths", "error", "sent"), [(2, httpx.ReadTimeout, 2), (1, httpx.ConnectError, 1)]
)
async def test_a_silent_service_is_named(deaths: int, error: Any, sent: int) -> None:
    server = Dies(deaths, error)
    async with served(server) as api:
        with pytest.raises(ApiError, match=f"does not answer .{error.__name__}"):
            await api.call("POST", "/v1/admin-keys", {})
    assert len(server.keys) == sent


@pytest.mark.parametrize(
    ("path", "sent"),
    [("/v1/tiers/a?b", "/v1/tiers/a%3Fb"), ("/v1/models/a/b@1", "/v1/models/a/b@1")],
)
async def test_an_id_is_never_more_than_an_id(path: str, sent: str) -> None:
    seen: list[bytes] = []

    def server(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(200, json={})

    async with served(server) as api:
        await api.call("DELETE", path)
        assert seen == [sent.encode()]
        for wrong in ("/v1/tiers/..", "/v1/tiers/", "/v1/models/../tiers/a"):
            with pytest.raises(ApiError, match="an id is missing"):
                await api.call("DELETE", wrong)
        assert len(seen) == 1


@pytest.mark.parametrize(
    ("status", "path", "told"),
    [
        (404, "/v1/tiers/x", "see: sluice tiers list"),
        (404, "/v1/artifacts/uploads/x", "see: sluice artifacts uploads list"),
        (401, "/v1/tiers", "SLUICE_ADMIN_KEY"),
        (409, "/v1/tiers/x", "why$"),
    ],
)
async def test_a_refusal_says_where_to_look(status: int, path: str, told: str) -> None:
    async with served(lambda _: httpx.Response(status, json={"detail": "why"})) as api:
        with pytest.raises(ApiError, match=told):
            await api.call("GET", path)
