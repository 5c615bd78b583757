"""How a hub hands closings and counts to gateways: at once, in parts, to those that know them."""

import asyncio

import pytest

from router.core.router import RouterCore
from router.core.types.config import CoreConfig
from router.hub import Hub
from router.metrics import RouterMetrics
from router.outgoing import GatewayLink
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from tests.unit.router.test_closing import submit

WAIT_S = 60.0


@pytest.fixture
async def hub():
    hub = Hub(RouterCore(CoreConfig()), RouterMetrics(), "router")
    yield hub
    hub.close()


def carried(link: GatewayLink) -> list[RequestEvent]:
    """Take a message, as a writer does; return what it carries."""
    message = wire.ConnectResponse.FromString(link.take() or b"")
    return [RequestEvent.FromString(data) for data in message.closings]


async def some(link: GatewayLink) -> list[RequestEvent]:
    async with asyncio.timeout(WAIT_S):
        while True:
            if found := carried(link):
                return found
            await asyncio.sleep(0.005)


async def test_a_router_says_at_once_that_it_is_there(hub: Hub) -> None:
    link = hub.connect("gateway", takes_closings=True)
    hub.tick()
    [here] = carried(link)
    assert (here.schema_version, here.model, here.count.number) == (3, "", 1)


async def test_only_gateways_that_know_closings_get_them(hub: Hub) -> None:
    old = hub.connect("old")
    hub.tick()
    assert not carried(old)
    new = hub.connect("new", takes_closings=True)
    hub.tick()
    assert not carried(old)
    assert carried(new)


async def test_a_gateway_that_gives_closings_knows_them(hub: Hub) -> None:
    link = hub.connect("gateway")  # before Hello had a word for it
    hub.request(link, wire.ConnectRequest(submits=[submit(1)]))
    hub.tick()
    assert carried(link)


async def test_a_gateway_gets_more_after_it_took_the_waiting_messages(hub: Hub) -> None:
    hub.tick()
    hub._closings.report(submit(it).closing for it in range(2000))
    link = hub.connect("gateway", takes_closings=True)
    parts = [await some(link)]
    while sum(map(len, parts)) < 2000:
        parts.append(await some(link))
    assert max(map(len, parts)) <= 500


async def test_the_end_of_a_router_hands_everything_over(hub: Hub) -> None:
    link = hub.connect("gateway", takes_closings=True)
    lost = hub.connect("lost", takes_closings=True)
    lost.accounts.carried([submit(it).closing for it in range(3000)], hub._loop.time())
    hub.disconnect(lost)
    found: list[RequestEvent] = []

    async def write() -> None:
        while True:
            found.extend(carried(link))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(write())
        await hub.send_last(WAIT_S)
        await hub.flush(WAIT_S)
        writing.cancel()
    assert len({it.event_id for it in found if it.schema_version == 1}) == 3000
    assert any(it.count.is_last for it in found)


async def test_messages_untaken_at_the_end_count_as_dropped(hub: Hub) -> None:
    link = hub.connect("frozen", takes_closings=True)  # it reads nothing
    lost = hub.connect("lost", takes_closings=True)
    lost.accounts.carried([submit(it).closing for it in range(1200)], hub._loop.time())
    hub.disconnect(lost)
    await hub.send_last(0.05)
    hub.measure()
    page = hub.exposition().decode()
    [line] = [it for it in page.splitlines() if it.startswith("router_closings_dropped_total")]
    assert 0 < float(line.split()[1]) <= 1201
    assert len(carried(link)) <= 500
