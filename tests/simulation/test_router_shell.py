"""The router's real hub and attachments under virtual time, with simulated hosts behind them."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from router.attach import CREDIT_EVERY_S, RESUME_S, Attachment
from router.core import invariants
from router.core.router import RouterCore
from router.core.types.actions import EjectionNotice
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.core.types.request import Dispatch
from router.hub import Hub
from router.metrics import RouterMetrics
from router.outgoing import GatewayLink, HostOutbox
from sim.engine import StepCost, token_at
from sim.host import SimHost, SimHostStream
from sim.loop import VirtualLoop, run
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

CELL = "cell-0"
LIMITS = EngineLimits(4096, 16, 256, 512, 16)
SILENCE_S = 1.0


def dispatches(setup: "Setup") -> list[Dispatch]:
    """What is open on any replica."""
    return dispatched(setup.hub)


def dispatched(hub: Hub) -> list[Dispatch]:
    """The same of a hub."""
    books = hub.core.replicas.values()
    return [dispatch for book in books for dispatch in book.dispatches.values() if dispatch.is_open]


class Setup:
    """Hosts, their attachments, one gateway that reads every millisecond."""

    def __init__(self, tasks: asyncio.TaskGroup, replicas: int):
        self.hub = Hub(RouterCore(CoreConfig()), RouterMetrics())
        self.hosts = [SimHost(LIMITS, StepCost()) for _ in range(replicas)]
        self.jobs = [tasks.create_task(host.run()) for host in self.hosts]
        names = [f"replica-{number}" for number in range(len(self.hosts))]
        self.hub.plan([CELL], [ReplicaPlan(name, CELL) for name in names])
        self.attachments = [
            Attachment(
                self.hub, name, host.open_stream, host.probe, router_id="r", silence_s=SILENCE_S
            )
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


def simulate(scenario: Callable[[Setup], Awaitable[None]], replicas: int = 2) -> Setup:
    async def main() -> Setup:
        async with asyncio.TaskGroup() as tasks:
            setup = Setup(tasks, replicas)
            await scenario(setup)
            await setup.finish()
        return setup

    return run(main())


@pytest.mark.parametrize("waiting", [0, 200])
def test_frames_within_a_millisecond_are_one_pass_unless_a_request_waits(waiting: int):
    async def passes() -> int:
        hub = Hub(RouterCore(CoreConfig()), RouterMetrics())
        outboxes = {f"replica-{it}": HostOutbox(it + 1) for it in range(8)}
        hub.plan([CELL], [ReplicaPlan(name, CELL) for name in outboxes])
        link = hub.connect("gateway")
        for name, outbox in outboxes.items():
            hub.attached(name, outbox, LIMITS)
        submits = [
            wire.Submit(handle=it, cell_id=CELL, prompt=[it] * 20, output_tokens_max=1000)
            for it in range(1, 9 + waiting)
        ]
        hub.request(link, wire.ConnectRequest(submits=submits))
        await asyncio.sleep(0.01)
        sequences = {
            name: [it.id for message in outbox.take() for it in message.submit.sequences]
            for name, outbox in outboxes.items()
        }
        running = {row.handle for row in dispatched(hub)}
        ticked: list[float] = []
        tick = hub.core.tick
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(hub.core, "tick", lambda now: (ticked.append(now), tick(now))[1])
        for (name, outbox), ids in zip(outboxes.items(), sequences.values(), strict=True):
            rows = len(ids)
            state = engine.EngineState(running=rows, step_us=20_000)
            frame = engine.StepFrame(
                step=1, steps=1, sequence=ids, count=[1] * rows, token=[7] * rows, state=state
            )
            hub.frame(name, outbox.epoch, frame)
            await asyncio.sleep(0.0001)
        await asyncio.sleep(0.01)
        told = wire.ConnectResponse.FromString(link.take())
        assert set(told.handle) >= running
        monkeypatch.undo()
        hub.close()
        return len(ticked)

    ticks = run(passes())
    assert ticks >= 8 if waiting else ticks <= 3


def test_tokens_arrive_whole_and_in_order():
    async def scenario(setup: Setup) -> None:
        setup.submit(*range(1, 61))
        await setup.until(lambda: len(setup.outcomes) == 60)

    setup = simulate(scenario)
    for handle, outcome in setup.outcomes.items():
        assert outcome.kind == wire.OUTCOME_KIND_LENGTH
        assert setup.tokens[handle] == [token_at(handle, 50 + n) for n in range(40)]


def test_a_host_at_work_hears_from_us_in_time(monkeypatch: pytest.MonkeyPatch):
    granted_at: list[float] = []
    grant = SimHostStream.grant

    def note(stream: SimHostStream, frames: int) -> list[int]:
        granted_at.append(asyncio.get_running_loop().time())
        return grant(stream, frames)

    async def scenario(setup: Setup) -> None:
        monkeypatch.setattr(SimHostStream, "grant", note)
        setup.submit(1, output=1000)
        await setup.until(lambda: 1 in setup.outcomes)

    setup = simulate(scenario, replicas=1)
    ended_at = setup.ended_at[1]
    heard_at = [at for at in granted_at if at <= ended_at]
    gaps = [later - earlier for earlier, later in pairwise([*heard_at, ended_at])]
    assert len(heard_at) > 10
    assert max(gaps) < CREDIT_EVERY_S


@pytest.mark.parametrize("delay_s", [0.0, 0.0003, 0.004, 0.02])
def test_a_stream_that_is_cut_while_its_host_lives_costs_nothing(delay_s: float):
    """Also when it is cut again and again, at any moment of a step, and while streams end."""

    async def scenario(setup: Setup) -> None:
        setup.submit(*range(1, 41), output=200)
        await setup.until(lambda: len(setup.tokens) >= 20)
        for _ in range(8):
            await asyncio.sleep(0.15 + delay_s)
            for host in setup.hosts:
                host.cut()
        await setup.until(lambda: len(setup.outcomes) == 40)

    setup = simulate(scenario)
    for handle, outcome in setup.outcomes.items():
        assert outcome.kind == wire.OUTCOME_KIND_LENGTH
        assert setup.tokens[handle] == [token_at(handle, 50 + n) for n in range(200)]
    text = setup.hub.exposition().decode()
    assert "router_streams_resumed_total 16.0" in text
    assert "router_requeues_total 0.0" in text
    assert "router_replicas_lost_total 0.0" in text
    assert "router_stray_tokens_total 0.0" in text
    assert "router_count_mismatches_total 0.0" in text


def test_the_pause_of_a_cut_stream_is_milliseconds():
    async def scenario(setup: Setup) -> None:
        loop = asyncio.get_running_loop()
        setup.submit(1, output=400)
        await setup.until(lambda: len(setup.tokens.get(1, ())) >= 20)
        [host] = setup.hosts
        host.cut()
        cut_at = loop.time()
        seen = len(setup.tokens[1])
        await setup.until(lambda: len(setup.tokens[1]) > seen)
        assert loop.time() - cut_at <= 0.03

    simulate(scenario, replicas=1)


def test_a_cancel_while_the_stream_is_broken_reaches_the_engine():
    async def scenario(setup: Setup) -> None:
        setup.submit(1, 2, output=3000)
        await setup.until(lambda: len(setup.tokens) == 2)
        [host] = setup.hosts
        host.cut()
        setup.hub.request(setup.link, wire.ConnectRequest(cancels=[1]))
        await setup.until(lambda: len(host.engine.held) == 1)
        setup.hub.request(setup.link, wire.ConnectRequest(cancels=[2]))
        await setup.until(lambda: not host.engine.held)
        await setup.until(lambda: not setup.hub.core.replicas["replica-0"].dispatches)

    simulate(scenario, replicas=1)


def test_requests_sent_during_a_stream_break_are_done_elsewhere():
    """Dispatches that a dead connection swallowed are noticed when it is resumed."""

    async def scenario(setup: Setup) -> None:
        handles = iter(range(1, 401))
        for _ in range(40):
            setup.submit(*(next(handles) for _ in range(10)), output=5)
            setup.hosts[0].cut()
            await asyncio.sleep(0.05)
        await setup.until(lambda: len(setup.outcomes) == 400)

    setup = simulate(scenario)
    for handle, outcome in setup.outcomes.items():
        assert outcome.kind == wire.OUTCOME_KIND_LENGTH
        assert setup.tokens[handle] == [token_at(handle, 50 + n) for n in range(5)]


def test_a_host_that_does_not_come_back_in_time_is_lost():
    async def scenario(setup: Setup) -> None:
        loop = asyncio.get_running_loop()
        setup.submit(*range(1, 21), output=400)
        await setup.until(lambda: len(setup.tokens) == 20)
        host = setup.hosts[0]
        host.freeze()
        host.cut()  # it accepts connections, and never answers
        cut_at = loop.time()
        book = setup.hub.core.replicas["replica-0"]
        await setup.until(lambda: book.limits is None)
        assert RESUME_S <= loop.time() - cut_at <= RESUME_S + 0.01
        await setup.until(lambda: len(setup.outcomes) == 20)

    simulate(scenario)


def test_an_engine_with_long_steps_is_not_taken_for_a_frozen_one():
    """Its steps grow to more than the silence that would be the end of another."""

    async def scenario(setup: Setup) -> None:
        setup.submit(*range(1, 5), output=60)
        await setup.until(lambda: len(setup.tokens) == 4)
        for slowness in (10, 30, 60, 120, 150):  # steps of up to 1.2 s
            for host in setup.hosts:
                host.engine.slowness = slowness
            await asyncio.sleep(4.0)
        await setup.until(lambda: len(setup.outcomes) == 4)

    setup = simulate(scenario)
    assert {outcome.kind for outcome in setup.outcomes.values()} == {wire.OUTCOME_KIND_LENGTH}
    assert "router_replicas_lost_total 0.0" in setup.hub.exposition().decode()


def test_a_router_that_stood_still_itself_loses_no_replica():
    async def scenario(setup: Setup) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        setup.submit(*range(1, 21), output=300)
        await setup.until(lambda: len(setup.tokens) == 20)
        for host in setup.hosts:
            host.freeze()
        loop.stand_still(5.0)
        for host in setup.hosts:
            host.revive()
        await setup.until(lambda: len(setup.outcomes) == 20)

    setup = simulate(scenario)
    assert {outcome.kind for outcome in setup.outcomes.values()} == {wire.OUTCOME_KIND_LENGTH}
    assert "router_replicas_lost_total 0.0" in setup.hub.exposition().decode()


def test_a_replica_that_lies_is_found_by_probes_and_given_nothing_more():
    accused: list[EjectionNotice] = []

    async def scenario(setup: Setup) -> None:
        await setup.until(lambda: all(book.limits for book in setup.hub.core.replicas.values()))
        setup.submit(*range(1, 9), output=600)
        await setup.until(lambda: len(setup.tokens) == 8)
        setup.hub.accuse_by(accused.append)
        setup.hosts[2].engine.is_lying = True
        health = setup.hub.core.cells[CELL].fleet.health
        await setup.until(lambda: health.reason("replica-2") == "lying")
        running = {dispatch.replica_id for dispatch in dispatches(setup)}
        assert "replica-2" not in running
        setup.submit(*range(100, 130), output=20)
        await setup.until(lambda: all(handle in setup.outcomes for handle in range(100, 130)))
        assert not setup.hosts[2].engine.held
        setup.hosts[2].engine.is_lying = False
        await setup.until(lambda: health.reason("replica-2") == "")

    setup = simulate(scenario, replicas=4)
    assert accused[0] == EjectionNotice("replica-2", CELL, 3, 3), "the control plane is told"
    for handle in range(100, 130):
        assert setup.tokens[handle] == [token_at(handle, 50 + n) for n in range(20)]


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
