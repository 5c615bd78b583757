"""The agent's stream to a control plane that refuses it, falls silent, or ends it."""

import asyncio

import grpc
import grpc.aio
import pytest

from replica.agent.control import ControlLink
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1 import agent_pb2_grpc

pytestmark = pytest.mark.real


class Plane(agent_pb2_grpc.AgentServiceServicer):
    """Refuses the first calls, ends the next one, then serves."""

    def __init__(self) -> None:
        self.calls = 0

    async def Sync(self, request_iterator, context) -> None:  # noqa: N802 - gRPC's name
        self.calls += 1
        await context.read()
        if self.calls <= 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no state yet")
        await context.write(agent.SyncResponse(version=self.calls))
        if self.calls > 3:
            await context.read()
            await asyncio.sleep(60)


async def test_the_agent_comes_back_after_every_end_and_can_still_be_stopped() -> None:
    plane, versions = Plane(), []
    served = asyncio.Event()

    def desired(response: agent.SyncResponse) -> None:
        versions.append(response.version)
        if response.version == 4:
            served.set()

    server = grpc.aio.server()
    agent_pb2_grpc.add_AgentServiceServicer_to_server(plane, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = ControlLink(f"127.0.0.1:{port}", lambda: agent.SyncRequest(node_id="n"), desired)
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(link.run())
            async with asyncio.timeout(60):
                await served.wait()
            assert not running.done()
            running.cancel()
    finally:
        await server.stop(None)
    assert running.cancelled()
    assert versions == [3, 4]
