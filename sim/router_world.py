"""A discrete-event world around the real router core: gateways, engines, links and faults.

Everything follows from the seed. After every event the core's invariants are checked; at the end
`World.verify` checks what was promised to clients: one outcome each, no token lost or doubled.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from router import wire as convert
from router.core import invariants
from router.core.model import Actions, Batch, CoreConfig, EngineLimits, ReplicaPlan
from router.core.router import RouterCore
from sim.engine import SimEngine, StepCost, token_at
from sluice.wire.router.v1 import router_pb2 as wire

CELL = "cell-0"
GATEWAY = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Seeded requests: Poisson arrivals, lognormal lengths."""

    requests: int = 200
    rate_per_s: float = 50.0
    prompt_tokens: float = 60.0
    output_tokens: float = 30.0
    tenants: int = 3
    cancel_share: float = 0.05
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a replica: die, freeze, busy, fail; it is over after `for_s`."""

    at_s: float
    kind: str
    replica: int
    for_s: float = 1.0


@dataclass(slots=True)
class Client:
    """What one client has seen, over all resumes of its request."""

    submit: wire.Submit
    arrived_at: float = 0.0
    tokens: list[int] = field(default_factory=list[int])
    final: wire.Outcome | None = None
    resumes: int = 0
    first_at: float | None = None


@dataclass(slots=True)
class _Node:
    engine: SimEngine
    epoch: int = 0
    is_alive: bool = True
    is_frozen: bool = False
    is_stepping: bool = False


class World:
    """One run: `load` and `plan` what is to happen, then `run`, then `verify`.

    `trace` is everything that was dispatched and told, for comparing runs.
    """

    def __init__(
        self,
        seed: int,
        *,
        replicas: int = 2,
        limits: EngineLimits | None = None,
        cost: StepCost | None = None,
        config: CoreConfig | None = None,
        link_s: float = 0.001,
        silence_s: float = 2.0,
    ) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation is to be repeatable
        self.now = 0.0
        self.core = RouterCore(config or CoreConfig())
        self.limits = limits or EngineLimits(4096, 16, 256, 512, 16)
        self.clients: list[Client] = []
        self.trace: list[tuple[object, ...]] = []
        self.queue_max = 0
        self._by_handle: dict[int, Client] = {}  # live handles only: each ends once
        self._handles = 0
        self._link_s = link_s
        self._silence_s = silence_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._events_made = 0
        self._tick_at = float("inf")
        self._nodes = {
            f"replica-{number}": _Node(SimEngine(self.limits, cost or StepCost()))
            for number in range(replicas)
        }
        self.core.on_gateway(GATEWAY)
        plans = [ReplicaPlan(replica_id, CELL) for replica_id in self._nodes]
        self.core.on_cells([CELL], plans, self.now)
        for replica_id in self._nodes:
            self._attach(replica_id)

    # --- what is to happen ------------------------------------------------------------------

    def load(self, workload: Workload) -> None:
        """Plan the arrivals, and the cancels, of a workload."""
        at_s = 0.0
        for _ in range(workload.requests):
            at_s += self.random.expovariate(workload.rate_per_s)
            prompt_tokens = self._length(workload.prompt_tokens, self.limits.prompt_tokens_max)
            output = self._length(
                workload.output_tokens, self.limits.context_tokens_max - prompt_tokens
            )
            submit = wire.Submit(
                cell_id=CELL,
                tenant_id=f"tenant-{self.random.randrange(workload.tenants)}",
                tier_priority=self.random.choice((0, 10)),
                prompt=[self.random.randrange(50_000)] * prompt_tokens,
                output_tokens_max=output,
                deadline_ms=workload.deadline_ms,
            )
            client = Client(submit, arrived_at=at_s)
            self.clients.append(client)
            self.at(at_s, partial(self._submit, client))
            if self.random.random() < workload.cancel_share:
                leave_s = at_s + self.random.expovariate(2.0)
                self.at(leave_s, partial(self._leave, client))

    def plan(self, fault: Fault) -> None:
        """Plan a fault and its end."""
        replica_id = f"replica-{fault.replica}"
        self.at(fault.at_s, partial(self._break, replica_id, fault))
        self.at(fault.at_s + fault.for_s, partial(self._heal, replica_id))

    def _length(self, median: float, longest: int) -> int:
        return max(1, min(longest, round(self.random.lognormvariate(0.0, 0.8) * median)))

    # --- time -------------------------------------------------------------------------------

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do `action` at a time; events of one time happen in the order they were made."""
        self._events_made += 1
        heappush(self._events, (time_s, self._events_made, action))

    def run(self, *, until_s: float = 3600.0) -> None:
        """Handle every event; afterwards nothing runs anywhere."""
        while self._events:
            self.now, _, action = heappop(self._events)
            assert self.now < until_s, "the world does not come to rest"
            action()
            self._perform(self.core.tick(self.now))
            invariants.check(self.core)
            waiting = (cell.queue.requests for cell in self.core.cells.values())
            self.queue_max = max(self.queue_max, *waiting)
            self._plan_tick()

    def verify(self) -> None:
        """Assert what clients were promised, and that nothing is left behind."""
        assert not self._by_handle, "every request ends"
        for client in self.clients:
            final = client.final
            assert final is not None, "exactly one outcome"
            prompt = client.submit.prompt
            start = len(prompt)
            expected = [token_at(prompt[0], start + n) for n in range(len(client.tokens))]
            assert client.tokens == expected, "no token is lost, doubled or from elsewhere"
            if final.kind in (wire.OUTCOME_KIND_STOP, wire.OUTCOME_KIND_LENGTH):
                assert len(client.tokens) == client.submit.output_tokens_max
        assert not self.core.live_requests
        for book in self.core.replicas.values():
            assert not book.slots, "the engine has reported the end of everything"
        assert not self.core.stats.count_mismatches
        assert not self.core.stats.stray_tokens

    def _plan_tick(self) -> None:
        if not self.core.live_requests:
            return
        due = max(self.core.next_tick_at(self.now), self.now + 1e-6)
        if not self.now < self._tick_at <= due:
            self._tick_at = due
            self.at(due, lambda: None)

    # --- clients ----------------------------------------------------------------------------

    def _submit(self, client: Client) -> None:
        self._handles += 1
        emitted = len(client.tokens)
        message = wire.Submit()
        message.CopyFrom(client.submit)
        message.handle = self._handles
        message.prompt.extend(client.tokens)
        message.resumed_tokens = emitted
        message.output_tokens_max = client.submit.output_tokens_max - emitted
        self._by_handle[message.handle] = client
        self.core.submit(GATEWAY, message, self.now)

    def _leave(self, client: Client) -> None:
        for handle, owner in list(self._by_handle.items()):
            if owner is client:
                self.core.cancel(GATEWAY, handle)

    def _receive(self, batch: Batch) -> None:
        start = 0
        for handle, number in zip(batch.handles, batch.counts, strict=True):
            client = self._by_handle[handle]  # nothing follows an outcome
            client.first_at = self.now if client.first_at is None else client.first_at
            client.tokens += batch.tokens[start : start + number]
            start += number
        for outcome in batch.outcomes:
            client = self._by_handle.pop(outcome.handle)
            self.trace.append((round(self.now, 9), outcome.handle, outcome.kind, outcome.code))
            if outcome.kind == wire.OUTCOME_KIND_LOST:
                client.resumes += 1
                self._submit(client)
            else:
                client.final = outcome

    # --- engines ----------------------------------------------------------------------------

    def _perform(self, actions: Actions) -> None:
        for replica_id, slots in actions.dispatches.items():
            node = self._nodes[replica_id]
            self.trace.append((round(self.now, 9), replica_id, *(slot.handle for slot in slots)))
            message = convert.submit_message(node.epoch, slots)
            self._send(node, partial(node.engine.submit, message.sequences))
        for replica_id, gone in actions.cancels.items():
            node = self._nodes[replica_id]
            self._send(node, partial(node.engine.cancel, gone))
        for _, batch in actions.batches:
            self._receive(batch)

    def _send(self, node: _Node, message: Callable[[], None]) -> None:
        epoch = node.epoch

        def arrive() -> None:
            if node.is_alive and node.epoch == epoch:
                message()
                self._wake(node)

        self.at(self.now + self._link_s, arrive)

    def _wake(self, node: _Node) -> None:
        if node.is_stepping or node.is_frozen or not node.is_alive or node.engine.is_idle:
            return
        node.is_stepping = True
        engine, epoch = node.engine, node.epoch
        frame, step_s = engine.step()

        def done() -> None:
            if node.engine is not engine:
                return  # died meanwhile
            if node.is_frozen:
                self.at(self.now + 0.05, done)
                return
            node.is_stepping = False
            if node.epoch == epoch:
                self.at(self.now + self._link_s, deliver)
            self._wake(node)

        def deliver() -> None:
            if node.is_alive:
                replica_id = next(key for key, value in self._nodes.items() if value is node)
                self.core.on_frame(replica_id, epoch, frame, self.now)

        self.at(self.now + step_s, done)

    def _attach(self, replica_id: str) -> None:
        node = self._nodes[replica_id]
        node.epoch += 1
        node.engine.cancel(node.engine.held)  # a newer epoch ends what the older one ran
        self.core.on_attached(replica_id, node.epoch, self.limits, self.now)

    # --- faults -----------------------------------------------------------------------------

    def _break(self, replica_id: str, fault: Fault) -> None:
        node = self._nodes[replica_id]
        if fault.kind == "die":
            node.is_alive = False
            node.is_stepping = False
            node.engine = SimEngine(self.limits, node.engine.cost)
            self.core.on_replica_lost(replica_id, node.epoch, self.now)
        elif fault.kind == "freeze":
            node.is_frozen = True
            self.at(self.now + self._silence_s, partial(self._silent, replica_id))
        elif fault.kind == "busy":
            node.engine.is_busy_fault = True
        elif fault.kind == "fail":
            node.engine.fail_all()
            self._wake(node)
        else:
            raise ValueError(fault.kind)

    def _silent(self, replica_id: str) -> None:
        node = self._nodes[replica_id]
        if node.is_frozen:
            self.core.on_replica_lost(replica_id, node.epoch, self.now)

    def _heal(self, replica_id: str) -> None:
        node = self._nodes[replica_id]
        node.is_frozen = False
        node.engine.is_busy_fault = False
        node.is_alive = True
        if self.core.replicas[replica_id].limits is None:
            self._attach(replica_id)
        self._wake(node)
