"""Runs the router's real shell and core with simulated hosts that fail, under virtual time.

A simulated gateway submits a seeded workload and resumes lost streams, like the real gateway. All
tokens that its clients receive are compared with the tokens that the engines must emit.
"""

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import ne

from router.attach import Attachment
from router.core.fleet.health import HealthState
from router.core.router import RouterCore
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.hub import Hub
from router.metrics import RouterMetrics
from sim.engine import StepCost, token_at
from sim.host import SimHost
from sim.loop import run as run_virtually
from sluice.wire.router.v1 import router_pb2 as wire

CELL = "cell-0"
SILENCE_S = 1.0
LIMITS = EngineLimits(8192, 32, 512, 4096, 16)
COST = StepCost()
_LOOK_S = 0.001
_FOLLOW_S = 60.0  # longest wait for the detection of a fault, or for the recovery after it
_SLOWNESS = 5.0
_FLAPS = 6
_FLAP_DOWN_S = 0.3
_FLAP_UP_S = 1.2


@dataclass(frozen=True, slots=True)
class FaultScenario:
    """The settings of a run with one fault.

    Attributes:
        fault: One of `FAULTS`, on the first replica.
        seed: Seed of the workload.
        replicas: Number of replicas in the cell.
        rate_per_s: Arrivals per second, constant over the run.
        fault_at_s: Virtual seconds at which the fault begins.
        fault_s: Seconds that the fault lasts.
        run_s: Virtual seconds until the last arrival.
    """

    fault: str
    seed: int
    replicas: int = 8
    rate_per_s: float = 40.0
    fault_at_s: float = 8.0
    fault_s: float = 8.0
    run_s: float = 30.0


@dataclass(slots=True, eq=False)
class FaultClient:
    """The tokens and times of one client's request, over all resumes."""

    prompt: list[int]
    output_max: int
    arrived_at: float
    tokens: list[int] = field(default_factory=list[int])
    first_at: float = 0.0
    told_at: float = 0.0
    pause_s: float = 0.0
    resumes: int = 0
    final: wire.Outcome | None = None

    def expected(self) -> list[int]:
        """Return the tokens that the client should have received so far."""
        start = len(self.prompt)
        return [token_at(self.prompt[0], start + number) for number in range(len(self.tokens))]


@dataclass(frozen=True, slots=True)
class FaultReport:
    """The effects of a fault on clients, and the times until the router noticed it.

    Attributes:
        requests: Number of requests that clients submitted.
        lost: Requests that did not end with all of their tokens.
        duplicated: Requests that received more tokens than requested.
        wrong_tokens: Number of wrong tokens sent to clients. A lying replica may send wrong tokens
            before its detection.
        wrong_later: Wrong tokens sent more than a step after the detection.
        resumed: Number of resumes of answers that had emitted tokens.
        pause_s: Longest time between two tokens of one stream.
        ttft_p99_s: 99th percentile of TTFT over all requests.
        detect_s: Seconds from the fault until the router sent no more requests to the replica, or
            None if the router did not detect the fault.
        back_s: Seconds from the end of the fault until the replica was healthy again, or None if
            the replica was healthy throughout.
        ejected: Reasons of the ejections.
    """

    requests: int
    lost: int
    duplicated: int
    wrong_tokens: int
    wrong_later: int
    resumed: int
    pause_s: float
    ttft_p99_s: float
    detect_s: float | None
    back_s: float | None
    ejected: tuple[str, ...]


class FaultWorld:
    """Simulated hosts, the router's real shell and one gateway. `run` simulates the scenario."""

    def __init__(self, scenario: FaultScenario, tasks: asyncio.TaskGroup) -> None:
        self.scenario = scenario
        self._loop = asyncio.get_running_loop()
        self._random = random.Random(scenario.seed)  # noqa: S311 - repeatable
        self.hub = Hub(RouterCore(CoreConfig()), RouterMetrics())
        self.hosts = [SimHost(LIMITS, COST) for _ in range(scenario.replicas)]
        names = [f"replica-{number}" for number in range(scenario.replicas)]
        self.hub.plan([CELL], [ReplicaPlan(name, CELL) for name in names])
        self._attachments = [
            Attachment(
                self.hub, name, host.open_stream, host.probe, router_id="r", silence_s=SILENCE_S
            )
            for name, host in zip(names, self.hosts, strict=True)
        ]
        self._runs = [tasks.create_task(entry.run()) for entry in self._attachments]
        self._link = self.hub.connect("gateway")
        self._jobs = [tasks.create_task(host.run()) for host in self.hosts]
        self._jobs.append(tasks.create_task(self._read()))
        self.clients: list[FaultClient] = []
        self._open: dict[int, FaultClient] = {}
        self._handles = 0
        self._wrong: list[float] = []  # time of each wrong token
        self._broken_at = self._seen_at = self._healed_at = 0.0

    async def run(self) -> FaultReport:
        """Submit requests, break and heal the replica, and wait for the end of all requests."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._arrive())
            fault = tasks.create_task(self._break())
        detect_s, back_s = fault.result()
        async with asyncio.timeout(600):
            while self._open:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(_LOOK_S)
        report = self._report(detect_s, back_s)
        for attachment in self._attachments:
            attachment.stop()
        await asyncio.wait(self._runs, timeout=10)
        for job in self._jobs:
            job.cancel()
        self.hub.close()
        return report

    # --- clients ----------------------------------------------------------------------------

    async def _arrive(self) -> None:
        choose = self._random
        end_at = self._loop.time() + self.scenario.run_s
        while self._loop.time() < end_at:
            await asyncio.sleep(choose.expovariate(self.scenario.rate_per_s))
            prompt = [choose.randrange(50_000)] * self._length(200, 2000)
            client = FaultClient(prompt, self._length(80, 600), self._loop.time())
            self.clients.append(client)
            self._submit(client)

    def _length(self, median: float, longest: int) -> int:
        return max(2, min(longest, round(self._random.lognormvariate(0.0, 0.8) * median)))

    def _submit(self, client: FaultClient) -> None:
        self._handles += 1
        submit = wire.Submit(
            handle=self._handles,
            cell_id=CELL,
            tenant_id="tenant",
            prompt=client.prompt + client.tokens,
            output_tokens_max=client.output_max - len(client.tokens),
            resumed_tokens=len(client.tokens),
        )
        self._open[self._handles] = client
        self.hub.request(self._link, wire.ConnectRequest(submits=[submit]))

    async def _read(self) -> None:
        while True:
            await self._link.ready.wait()
            data = self._link.take()
            if data is not None:
                self._take(wire.ConnectResponse.FromString(data))

    def _take(self, message: wire.ConnectResponse) -> None:
        now, start = self._loop.time(), 0
        for handle, count in zip(message.handle, message.count, strict=True):
            client = self._open[handle]
            if client.tokens:
                client.pause_s = max(client.pause_s, now - client.told_at)
            else:
                client.first_at = now
            client.told_at = now
            known = len(client.tokens)
            client.tokens += message.token[start : start + count]
            start += count
            wrong = sum(map(ne, client.tokens[known:], client.expected()[known:]))
            self._wrong += [now] * wrong
        for outcome in message.outcomes:
            client = self._open.pop(outcome.handle)
            if outcome.kind == wire.OUTCOME_KIND_LOST:
                client.resumes += 1
                self._submit(client)
            else:
                client.final = outcome

    # --- faults -----------------------------------------------------------------------------

    async def _break(self) -> tuple[float | None, float | None]:
        """Break the first replica, and return the times of detection and of recovery."""
        scenario, host = self.scenario, self.hosts[0]
        await asyncio.sleep(scenario.fault_at_s)
        if scenario.fault == "none":
            return None, None
        self._broken_at = self._loop.time()
        FAULTS[scenario.fault](host)
        detect_s = await self._until(lambda: not self._is_healthy(), scenario.fault_s)
        if detect_s is not None:
            self._seen_at = self._loop.time()
        if scenario.fault == "flap":
            for _ in range(_FLAPS):
                await asyncio.sleep(_FLAP_DOWN_S)
                host.revive()
                await asyncio.sleep(_FLAP_UP_S)
                host.kill()
        else:
            await asyncio.sleep(max(0.0, self._broken_at + scenario.fault_s - self._loop.time()))
        heal(host)
        self._healed_at = self._loop.time()
        if self._is_healthy():
            return detect_s, None
        return detect_s, await self._until(self._is_healthy, _FOLLOW_S)

    def _is_healthy(self) -> bool:
        core = self.hub.core
        book = core.replicas["replica-0"]
        state = core.cells[CELL].fleet.health.state("replica-0")
        return book.limits is not None and not book.is_broken and state is HealthState.HEALTHY

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> float | None:
        """Return the seconds until a condition was true, or None after more than `limit_s`."""
        begin_at = self._loop.time()
        while not condition():
            if self._loop.time() - begin_at >= limit_s:
                return None
            await asyncio.sleep(_LOOK_S)
        return self._loop.time() - begin_at

    # --- results ----------------------------------------------------------------------------

    def _report(self, detect_s: float | None, back_s: float | None) -> FaultReport:
        clients = self.clients
        whole = [len(client.tokens) == client.output_max for client in clients]
        kinds = (wire.OUTCOME_KIND_LENGTH, wire.OUTCOME_KIND_STOP)
        ended = [client.final is not None and client.final.kind in kinds for client in clients]
        waits_s = [client.first_at - client.arrived_at for client in clients if client.first_at]
        late_at = self._seen_at + 0.1
        return FaultReport(
            requests=len(clients),
            lost=sum(
                not (is_whole and has_end) for is_whole, has_end in zip(whole, ended, strict=True)
            ),
            duplicated=sum(len(client.tokens) > client.output_max for client in clients),
            wrong_tokens=len(self._wrong),
            wrong_later=sum(at > late_at for at in self._wrong) if self._seen_at else 0,
            resumed=sum(client.resumes for client in clients),
            pause_s=max(client.pause_s for client in clients),
            ttft_p99_s=quantile(waits_s, 0.99),
            detect_s=detect_s,
            back_s=back_s,
            ejected=self._ejected(),
        )

    def _ejected(self) -> tuple[str, ...]:
        self.hub.measure()
        [ejections] = self.hub.metrics.ejections.collect()
        counts = (sample for sample in ejections.samples if sample.name.endswith("_total"))
        return tuple(sorted(sample.labels["reason"] for sample in counts))


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value that a share of the values do not exceed, or 0.0 without values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def heal(host: SimHost) -> None:
    """End every fault of a host."""
    host.engine.is_busy_fault = host.engine.is_lying = False
    host.engine.slowness = 1.0
    host.revive()


def _slow(host: SimHost) -> None:
    host.engine.slowness = _SLOWNESS


def _lie(host: SimHost) -> None:
    host.engine.is_lying = True


def _busy(host: SimHost) -> None:
    host.engine.is_busy_fault = True


FAULTS: dict[str, Callable[[SimHost], None]] = {
    "kill": SimHost.kill,
    "freeze": SimHost.freeze,
    "cut": SimHost.cut,
    "slow": _slow,
    "lie": _lie,
    "busy": _busy,
    "flap": SimHost.kill,
}


def simulate(scenario: FaultScenario) -> FaultReport:
    """Run a scenario under virtual time. Equal scenarios lead to equal reports."""

    async def main() -> FaultReport:
        async with asyncio.TaskGroup() as tasks:
            return await FaultWorld(scenario, tasks).run()

    return run_virtually(main())
