"""A router that owns cells, and reports a demand that tests set."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc.aio

from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub
from tests.links import trusted_channel

_OUTPUT_TOKENS = 100  # of an answer
TOKEN_US = 10_000  # so that a request is one second of a replica


class ReportingRouter:
    """A router that owns cells, and reports a demand that tests set."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.demand: dict[str, float] = {}  # work-seconds per second, by cell
        self.queued: dict[str, int] = {}
        self.queued_tokens: dict[str, int] = {}  # prompt tokens of the waiting requests
        self.state = wire.Objects()
        self.requests: dict[str, float] = {}
        self.prompts: dict[str, float] = {}  # prompt tokens per second, by cell
        self.prompt_tokens: dict[str, float] = {}
        self.number = 0
        self.intervals_ms: list[int] = []

    def report(self) -> wire.ReportDemandRequest:
        """Return the next report."""
        self.number += 1
        message = wire.ReportDemandRequest(router_id=self.router_id)
        for cell_id in self.demand:
            requests = int(self.requests.get(cell_id, 0.0))
            cell = message.cells.add(cell_id=cell_id, epoch=7, number=self.number)
            cell.tiers.add(
                priority=10,
                requests=requests,
                prompt_tokens=int(self.prompt_tokens.get(cell_id, 0.0)),
                output_tokens=_OUTPUT_TOKENS * requests,
                queued=self.queued.get(cell_id, 0),
                queued_prompt_tokens=self.queued_tokens.get(cell_id, 0),
            )
            cell.speed.prompt_token_us, cell.speed.output_token_us = 100, TOKEN_US
            cell.speed.sequences, cell.speed.steps = 8, 500
        return message

    async def run(self, address: str) -> None:
        """Report until cancelled; a control plane that is away is told later."""
        tick_s = 0.1
        async with trusted_channel(address) as channel:
            stub = ControlServiceStub(channel)
            watch = stub.Watch(
                wire.WatchRequest(
                    role=wire.ROLE_ROUTER, instance_id=self.router_id, address="127.0.0.1:9"
                )
            )
            try:
                while True:
                    for cell_id, demand in self.demand.items():
                        before = self.requests.get(cell_id, 0.0)
                        self.requests[cell_id] = before + demand * tick_s
                    for cell_id, tokens in self.prompts.items():
                        before = self.prompt_tokens.get(cell_id, 0.0)
                        self.prompt_tokens[cell_id] = before + tokens * tick_s
                    try:
                        answer = await stub.ReportDemand(self.report(), timeout=5)
                        self.intervals_ms.append(answer.interval_ms)
                    except grpc.aio.AioRpcError:
                        pass
                    await asyncio.sleep(tick_s)
            finally:
                watch.cancel()


@asynccontextmanager
async def reporting(address: str, router_id: str = "router-s") -> AsyncGenerator[ReportingRouter]:
    router = ReportingRouter(router_id)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(router.run(address))
        yield router
        running.cancel()
