"""The router's real hub and attachments under virtual time, with simulated hosts behind them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.attach import Attachment
from router.core import invariants
from router.core.model import CoreConfig, EngineLimits, ReplicaPlan
from router.core.router import RouterCore
from router.hub import GatewayLink, Hub
from router.metrics import RouterMetrics
from sim.engine import StepCost, token_at
from sim.host import SimHost
from sim.loop import run
from sluice.wire.router.v1 import router_pb2 as wire

CELL = "cell-0"
LIMITS = EngineLimits(4096, 16, 256, 512, 16)


class Setup:
    """Two hosts, their attachments, one gateway that reads every millisecond."""

    def __init__(self, tasks: asyncio.TaskGroup):
        self.hub = Hub(RouterCore(CoreConfig()), RouterMetrics())
        self.hosts = [SimHost(LIMITS, StepCost()) for _ in range(2)]
        self.jobs = [tasks.create_task(host.run()) for host in self.hosts]
        names = [f"replica-{number}" for number in range(len(self.hosts))]
        self.hub.plan([CELL], [ReplicaPlan(name, CELL) for name in names])
        self.attachments = [
            Attachment(self.hub, name, host.open_stream, router_id="r", silence_s=2.0)
            for name, host in zip(names, self.hosts, strict=True)
        ]
        self.runs = [tasks.create_task(attachment.run()) for attachment in self.attachments]
        self.link = self.hub.connect("gateway")
        self.tokens: dict[int, list[int]] = {}
        self.outcomes: dict[int, wire.Outcome] = {}
        self.ended_at: dict[int, float] = {}
        self.jobs.append(tasks.create_task(self.read(self.link)))

    def submit(self, *handles: int, output: int = 40) -> None:
        submits = [
            wire.Submit(handle=handle, cell_id=CELL, prompt=[handle] * 50, output_tokens_max=output)
            for handle in handles
        ]
        self.hub.request(self.link, wire.ConnectRequest(submits=submits))

    async def read(self, link: GatewayLink) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await link.ready.wait()
            message = wire.ConnectResponse.FromString(link.take())
            start = 0
            for handle, count in zip(message.handle, message.count, strict=True):
                self.tokens.setdefault(handle, []).extend(message.token[start : start + count])
                start += count
            for outcome in message.outcomes:
                assert outcome.handle not in self.outcomes
                self.outcomes[outcome.handle] = outcome
                self.ended_at[outcome.handle] = loop.time()
            invariants.check(self.hub.core)
            await asyncio.sleep(0.001)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.001)

    async def finish(self) -> None:
        for attachment in self.attachments:
            attachment.stop()
        await asyncio.wait(self.runs, timeout=10)
        for job in self.jobs:
            job.cancel()
        self.hub.close()


def simulate(scenario: Callable[[Setup], Awaitable[None]]) -> Setup:
    async def main() -> Setup:
        async with asyncio.TaskGroup() as tasks:
            setup = Setup(tasks)
            await scenario(setup)
            await setup.finish()
        return setup

    return run(main())


def test_tokens_arrive_whole_and_in_order():
    async def scenario(setup: Setup) -> None:
        setup.submit(*range(1, 61))
        await setup.until(lambda: len(setup.outcomes) == 60)

    setup = simulate(scenario)
    for handle, outcome in setup.outcomes.items():
        assert outcome.kind == wire.OUTCOME_KIND_LENGTH
        assert setup.tokens[handle] == [token_at(handle, 50 + n) for n in range(40)]


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_lost_replica_is_noticed_in_time_and_comes_back(how: str):
    async def scenario(setup: Setup) -> None:
        loop = asyncio.get_running_loop()
        setup.submit(*range(1, 41), output=400)
        await setup.until(lambda: len(setup.tokens) >= 20)
        broken_at_s = loop.time()
        host = setup.hosts[0]
        if how == "kill":
            host.kill()
        else:
            host.freeze()
        book = setup.hub.core.replicas["replica-0"]
        await setup.until(lambda: book.limits is None)
        assert loop.time() - broken_at_s <= (0.01 if how == "kill" else 2.1)
        await setup.until(lambda: len(setup.outcomes) == 40)
        host.revive()
        await setup.until(lambda: book.limits is not None)
        setup.submit(*range(100, 120))
        await setup.until(lambda: len(setup.outcomes) == 60)

    setup = simulate(scenario)
    for handle, outcome in setup.outcomes.items():
        got = setup.tokens.get(handle, [])
        assert got == [token_at(handle, 50 + n) for n in range(len(got))]
        if handle >= 100:
            assert outcome.kind == wire.OUTCOME_KIND_LENGTH
        elif outcome.kind == wire.OUTCOME_KIND_LOST:
            assert got
    assert {o.kind for o in setup.outcomes.values()} == {
        wire.OUTCOME_KIND_LENGTH,
        wire.OUTCOME_KIND_LOST,
    }


def test_a_gateway_that_leaves_frees_the_engines():
    async def scenario(setup: Setup) -> None:
        setup.submit(*range(1, 21), output=700)
        await setup.until(lambda: len(setup.tokens) == 20)
        setup.hub.disconnect(setup.link)
        await setup.until(lambda: all(host.engine.is_idle for host in setup.hosts))
        assert not setup.hub.core.live_requests

    simulate(scenario)


def test_a_router_that_stops_leaves_the_engines_empty():
    async def scenario(setup: Setup) -> None:
        setup.submit(*range(1, 21), output=700)
        await setup.until(lambda: len(setup.tokens) == 20)

    setup = simulate(scenario)
    assert all(not host.engine.held for host in setup.hosts)
    assert not setup.hub.core.live_requests or setup.hub.core.cells[CELL].queue.requests
