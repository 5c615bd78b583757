"""What the control plane asks telemetry about texts, with a key that opens all of it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from control_plane.telemetry_client import FeedDownError
from control_plane.texts.store import TextStore, open_store
from sluice.errors import BadRequestError


class Peer:
    """A telemetry service that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.status = 200

    async def serve(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.raw_path}")
        return web.json_response({"data": []}, status=self.status)


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[tuple[Peer, TextStore]]:
    found, application = Peer(), web.Application()
    application.router.add_route("*", "/{anything:.*}", found.serve)
    async with (
        TestServer(application) as server,
        open_store(str(server.make_url("")), "key") as store,
    ):
        yield found, store


@pytest.mark.parametrize(
    "request_id", ["../requests", "..", ".", "", "a/b", "a?tenant=other", "a#b", "a%2fb", "a" * 129]
)
async def test_malformed_request_ids_never_leave(
    peer: tuple[Peer, TextStore], request_id: str
) -> None:
    telemetry, store = peer
    with pytest.raises(BadRequestError) as caught:
        await store.find("acme", request_id)
    assert caught.value.param == "request_id"
    assert telemetry.asked == []


async def test_ids_are_one_segment_and_one_value(peer: tuple[Peer, TextStore]) -> None:
    telemetry, store = peer
    assert await store.find("acme/eu+1", "req:1.x_-") == []
    await store.erase("acme/eu+1")
    assert telemetry.asked == [
        "GET /v1/texts/req:1.x_-?tenant=acme/eu%2B1",
        "DELETE /v1/texts?tenant=acme/eu%2B1",
    ]


async def test_errors_of_telemetry_are_passed_on_as_errors(peer: tuple[Peer, TextStore]) -> None:
    telemetry, store = peer
    telemetry.status = 400
    with pytest.raises(BadRequestError, match="telemetry says"):
        await store.erase("acme")


async def test_a_service_that_is_unwell_is_away(peer: tuple[Peer, TextStore]) -> None:
    telemetry, store = peer
    telemetry.status = 500
    with pytest.raises(FeedDownError):
        await store.erase("acme")
