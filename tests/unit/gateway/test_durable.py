"""Responses that end together are written to PostgreSQL together, and urgent ones at once."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc.aio
import pytest
import pytest_asyncio

from gateway.responses import durable
from sluice.process import free_port
from sluice.wire.state.v1 import state_pb2 as wire
from sluice.wire.state.v1 import state_pb2_grpc as service


class Control(service.StateServiceServicer):
    """A control plane that counts the responses of each call; probes bring none."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    async def Keep(  # noqa: N802 - gRPC's name
        self, request: wire.KeepRequest, context: object
    ) -> wire.KeepResponse:
        if request.responses:
            self.calls.append(len(request.responses))
        return wire.KeepResponse()


class Site:
    """A queue of responses before its control plane."""

    def __init__(self, address: str) -> None:
        self.control = Control()
        self.settled: list[int] = []
        self.queue = durable.Durable(address, self._settle)

    async def _settle(self, ids: Sequence[str]) -> None:
        self.settled.append(len(ids))


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    address = f"127.0.0.1:{free_port()}"
    found = Site(address)
    server = grpc.aio.server()
    service.add_StateServiceServicer_to_server(found.control, server)
    server.add_insecure_port(address)
    await server.start()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(found.queue.run())
        async with asyncio.timeout(20):
            while not found.queue.is_up:  # noqa: ASYNC110 - the queue reports no change
                await asyncio.sleep(0.01)
        yield found
        running.cancel()
    await server.stop(None)


async def _until_empty(site: Site) -> None:
    async with asyncio.timeout(20):
        while site.queue.waiting:  # noqa: ASYNC110 - the queue reports no change
            await asyncio.sleep(0.01)


async def test_responses_that_end_together_are_one_call_and_settle_together(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_GATHER_S", 1.0)
    for number in range(20):
        site.queue.offer(wire.StoredResponse(id=f"resp_{number}"))
        await asyncio.sleep(0.001)
    await _until_empty(site)
    assert site.control.calls == site.settled == [20]


async def test_a_full_batch_and_a_response_without_valkey_wait_for_no_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_GATHER_S", 3600.0)
    for number in range(durable._BATCH):
        site.queue.offer(wire.StoredResponse(id=f"resp_{number}"))
    await _until_empty(site)
    assert await site.queue.offer_and_wait(wire.StoredResponse(id="resp_urgent"), 20)
    assert site.control.calls == [durable._BATCH, 1]


async def test_large_responses_that_fill_a_batch_wait_for_no_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_GATHER_S", 3600.0)
    large = bytes(durable._BATCH_BYTES * 2 // 3)
    for number in range(3):
        site.queue.offer(wire.StoredResponse(id=f"resp_{number}", response=large))
    async with asyncio.timeout(20):
        while len(site.control.calls) < 2:  # noqa: ASYNC110 - the server reports no call
            await asyncio.sleep(0.01)
    assert site.control.calls[:2] == [1, 1]
