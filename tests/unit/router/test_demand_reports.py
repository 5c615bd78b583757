"""When a router reports its demand: at its interval, and earlier for work that waits for a sleeper."""

import asyncio
from collections.abc import Awaitable, Callable

from router.core.router import RouterCore
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.demand_reports import report_for_ever
from router.hub import Hub
from router.metrics import RouterMetrics
from router.outgoing import GatewayLink, HostOutbox
from sim.loop import run
from sluice.wire.router.v1 import router_pb2 as wire

CELL = "cell"
INTERVAL_S = 5.0
LIMITS = EngineLimits(4096, 1, 512, 1000, 16)


class Told:
    """The times of a router's reports, in virtual seconds, and its only cell."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.hub = Hub(RouterCore(CoreConfig()), RouterMetrics(), "router")
        self.link: GatewayLink = self.hub.connect("gateway")
        self.hub.plan([CELL], [ReplicaPlan("awake", CELL)])
        self.handles = 0

    async def report(self) -> float:
        self.at.append(asyncio.get_running_loop().time())
        return INTERVAL_S

    def submit(self, attempt: int = 0) -> float:
        """Send a request, and return its time."""
        self.handles += 1
        prompt = [7] * 16
        message = wire.Submit(
            handle=self.handles,
            cell_id=CELL,
            prompt=prompt,
            output_tokens_max=9,
            deadline_ms=60000,
            attempt=attempt,
        )
        self.hub.request(self.link, wire.ConnectRequest(submits=[message]))
        return asyncio.get_running_loop().time()


def told(script: Callable[[Told], Awaitable[None]]) -> list[float]:
    """Return the times of the reports while `script` runs under virtual time."""

    async def scenario() -> list[float]:
        own = Told()
        async with asyncio.TaskGroup() as tasks:
            reporting = tasks.create_task(report_for_ever(own.hub.work_waits, own.report))
            await script(own)
            reporting.cancel()
        own.hub.close()
        return own.at

    return run(scenario())


def test_the_first_request_of_a_cell_that_sleeps_is_reported_at_once() -> None:
    came: list[float] = []

    async def script(own: Told) -> None:
        own.hub.note_wakeable({CELL})
        await asyncio.sleep(13.3)
        came.append(own.submit())
        await asyncio.sleep(0.05)

    at = told(script)
    assert at[-1] == came[0]
    assert len(at) == 4


def test_a_crowd_that_waits_for_a_sleeper_is_reported_at_most_five_times_a_second() -> None:
    async def script(own: Told) -> None:
        own.hub.note_wakeable({CELL})
        await asyncio.sleep(2.0)
        for _ in range(200):
            own.submit()
            await asyncio.sleep(0.005)

    at = [it for it in told(script) if it >= 2.0]
    assert 4 <= len(at) <= 6


def test_a_queue_beside_a_sleeper_is_reported_if_it_lasts_for_half_a_second() -> None:
    def reports(requests: int) -> list[float]:
        async def script(own: Told) -> None:
            own.hub.attached("awake", HostOutbox(1), LIMITS)
            own.hub.note_wakeable({CELL})
            await asyncio.sleep(2.0)
            for _ in range(requests):
                own.submit()
            await asyncio.sleep(1.0)

        return [it for it in told(script) if 2.0 <= it <= 3.0]

    assert reports(1) == [], "it is dispatched at once"
    assert reports(9) == [2.5]


def test_requests_that_wait_when_their_last_replica_falls_asleep_are_reported() -> None:
    async def script(own: Told) -> None:
        await asyncio.sleep(2.0)
        own.submit()
        own.hub.note_wakeable({CELL})
        await asyncio.sleep(0.05)

    assert told(script)[-1] == 2.0


def test_without_sleepers_a_queue_is_reported_at_the_interval() -> None:
    async def script(own: Told) -> None:
        await asyncio.sleep(2.0)
        own.submit()
        await asyncio.sleep(20.0)

    assert len(told(script)) <= 6


def test_a_request_that_moves_here_from_another_pool_is_no_further_demand() -> None:
    async def script() -> None:
        own = Told()
        own.submit()
        own.submit(attempt=1)
        [report] = own.hub.work_reports()
        [tier] = report.tiers.values()
        assert (tier.requests, tier.prompt_tokens) == (1, 16)
        assert report.queued == {0: (2, 32)}
        own.hub.close()

    run(script())
