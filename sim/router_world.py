"""A discrete-event world around the real router core, with gateways, engines, links and faults.

The seed determines a run. After every event the world checks the core's invariants. At the end
`RouterWorld.verify` checks two promises to clients. Every request has one outcome, and no token is
lost or doubled.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from operator import ne
from typing import Self

from router import wire as convert
from router.core import invariants
from router.core.router import RouterCore
from router.core.types.actions import Actions
from router.core.types.batch import GatewayBatch
from router.core.types.canary import CanaryAnswer
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from sim.engine import SimEngine, StepCost, token_at
from sluice.detector.consensus import Text
from sluice.wire.engine.v1 import engine_pb2 as engine_wire
from sluice.wire.router.v1 import router_pb2 as wire

_PROBE_PROMPT = list(range(1, 13))
_PROBE_TOKENS = 8
_PROBE_TIMEOUT_S = 5.0
_RESUME_S = 0.005
_CONFIRM_S = 0.05  # delay of a credit message after the frames that it confirms
_SLOWNESS = 5.0
CELL = "cell-0"
GATEWAY = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """The parameters of seeded requests, with Poisson arrivals and lognormal lengths."""

    requests: int = 200
    rate_per_s: float = 50.0
    prompt_tokens: float = 60.0
    output_tokens: float = 30.0
    tenants: int = 3
    cancel_share: float = 0.05
    batch_share: float = 0.2
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a replica, which ends after `for_s` seconds.

    The kinds are die, freeze, cut (the stream breaks but the engine lives), busy, fail, slow and
    lie.
    """

    at_s: float
    kind: str
    replica: int
    for_s: float = 1.0


@dataclass(slots=True)
class WorldClient:
    """The tokens and the outcome of one client's request, over all resumes."""

    submit: wire.Submit
    arrived_at: float = 0.0
    tokens: list[int] = field(default_factory=list[int])
    final: wire.Outcome | None = None
    resumes: int = 0
    first_at: float | None = None


@dataclass(slots=True)
class _Node:
    """A replica and the router's stream to it.

    Attributes:
        is_cut: Whether the stream is broken and is being resumed.
        is_back: Whether the stream will be resumed when the present step ends.
        cancels: Cancels to be sent when the replica is attached again.
        ends: Ends of sequences that the router has not confirmed, by sequence.
    """

    replica_id: str
    engine: SimEngine
    epoch: int = 0
    is_alive: bool = True
    is_frozen: bool = False
    is_cut: bool = False
    is_back: bool = False
    is_stepping: bool = False
    cancels: list[int] = field(default_factory=list[int])
    ends: dict[int, engine_wire.Finished] = field(default_factory=dict[int, engine_wire.Finished])


class RouterWorld:
    """One simulated run. `load` and `plan` add its events, `run` runs them, `verify` checks.

    `trace` lists all dispatches and messages, so that tests can compare runs.
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
        silence_s: float = 1.0,
    ) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation is to be repeatable
        self.now = 0.0
        self.core = RouterCore(config or CoreConfig())
        self.limits = limits or EngineLimits(4096, 16, 256, 512, 16)
        self.clients: list[WorldClient] = []
        self.trace: list[tuple[object, ...]] = []
        self.queue_max = 0
        self.preemptions = 0  # number of preemptions, set by `verify`
        # Clients whose request has no outcome yet, so that a second outcome is an error.
        self._by_handle: dict[int, WorldClient] = {}
        self._handles = 0
        self._link_s = link_s
        self._silence_s = silence_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._events_made = 0
        self._to_come = 0
        self._has_lied = False
        self._tick_at = float("inf")
        self._nodes = {
            replica_id: _Node(replica_id, SimEngine(self.limits, cost or StepCost()))
            for replica_id in (f"replica-{number}" for number in range(replicas))
        }
        self.core.on_gateway(GATEWAY, self.now)
        plans = [ReplicaPlan(replica_id, CELL) for replica_id in self._nodes]
        self.core.on_cells([CELL], plans)
        for replica_id in self._nodes:
            self._attach(replica_id)

    # --- planned events ---------------------------------------------------------------------

    def load(self, workload: Workload, begin_s: float = 0.0) -> None:
        """Plan the arrivals and cancels of a workload that begins at `begin_s`."""
        at_s = begin_s
        for _ in range(workload.requests):
            at_s += self.random.expovariate(workload.rate_per_s)
            prompt_tokens = self._length(workload.prompt_tokens, self.limits.prompt_tokens_max)
            output = self._length(
                workload.output_tokens, self.limits.context_tokens_max - prompt_tokens
            )
            is_batch = self.random.random() < workload.batch_share
            submit = wire.Submit(
                cell_id=CELL,
                tenant_id=f"tenant-{self.random.randrange(workload.tenants)}",
                tier_priority=0 if is_batch else self.random.choice((5, 10)),
                is_preemptible=is_batch,
                prompt=[self.random.randrange(50_000)] * prompt_tokens,
                output_tokens_max=output,
                deadline_ms=workload.deadline_ms,
            )
            client = WorldClient(submit, arrived_at=at_s)
            self.clients.append(client)
            self._plan(at_s, partial(self._submit, client))
            if self.random.random() < workload.cancel_share:
                leave_s = at_s + self.random.expovariate(2.0)
                self.at(leave_s, partial(self._leave, client))

    def plan(self, fault: Fault) -> None:
        """Plan a fault and its end."""
        replica_id = f"replica-{fault.replica}"
        self._plan(fault.at_s, partial(self._break, replica_id, fault))
        self._plan(fault.at_s + fault.for_s, partial(self._heal, replica_id))

    def _plan(self, time_s: float, action: Callable[[], None]) -> None:
        """Plan an event that `run` waits for."""
        self._to_come += 1

        def happen() -> None:
            self._to_come -= 1
            action()

        self.at(time_s, happen)

    def _length(self, median: float, longest: int) -> int:
        return max(1, min(longest, round(self.random.lognormvariate(0.0, 0.8) * median)))

    # --- time -------------------------------------------------------------------------------

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at a time. Events of the same time run in the order of their planning."""
        self._events_made += 1
        heappush(self._events, (time_s, self._events_made, action))

    def play(self, workload: Workload, *faults: Fault) -> Self:
        """Run a workload with faults to its end, verify the promises, and return the world."""
        self.load(workload)
        for fault in faults:
            self.plan(fault)
        self.run()
        self.verify()
        return self

    def run(self, *, until_s: float = 600.0) -> None:
        """Handle all events, until only canary probes are planned, which never end."""
        while self._events and not self._is_at_rest():
            self.now, _, action = heappop(self._events)
            assert self.now < until_s, "the world does not come to rest"
            action()
            self._perform(self.core.tick(self.now))
            invariants.check(self.core)
            waiting = (cell.queue.requests for cell in self.core.cells.values())
            self.queue_max = max(self.queue_max, *waiting)
            self._plan_tick()

    def _is_at_rest(self) -> bool:
        is_idle = not self._to_come and not self.core.live_requests
        return is_idle and not any(book.dispatches for book in self.core.replicas.values())

    def verify(self) -> None:
        """Assert the promises to clients, and that no request or sequence is left over."""
        assert not self._by_handle, "every request ends"
        for client in self.clients:
            final = client.final
            assert final is not None, "exactly one outcome"
            prompt = client.submit.prompt
            start = len(prompt)
            expected = [token_at(prompt[0], start + n) for n in range(len(client.tokens))]
            wrong = sum(map(ne, client.tokens, expected))
            if self._has_lied:  # a liar's tokens are recognisable, and all others must be right
                wrong -= sum(map(_is_lie, client.tokens, expected))
            assert not wrong, "no token is lost, doubled or from elsewhere"
            if final.kind in (wire.OUTCOME_KIND_STOP, wire.OUTCOME_KIND_LENGTH):
                assert len(client.tokens) == client.submit.output_tokens_max
        assert not self.core.live_requests
        for book in self.core.replicas.values():
            assert not book.dispatches, "the engine has reported the end of everything"
        stats = self.core.take_stats()
        self.preemptions = stats.preemptions
        assert not stats.count_mismatches
        assert not stats.stray_tokens

    def _plan_tick(self) -> None:
        if not self.core.live_requests:
            return
        due = max(self.core.next_tick_at(self.now), self.now + 1e-6)
        if not self.now < self._tick_at <= due:
            self._tick_at = due
            self.at(due, lambda: None)

    # --- clients ----------------------------------------------------------------------------

    def _submit(self, client: WorldClient) -> None:
        self._handles += 1
        emitted = len(client.tokens)
        message = wire.Submit()
        message.CopyFrom(client.submit)
        message.handle = self._handles
        message.prompt.extend(client.tokens)
        message.resumed_tokens = emitted
        message.output_tokens_max = client.submit.output_tokens_max - emitted
        self._by_handle[message.handle] = client
        self.core.submit(GATEWAY, convert.request(message), self.now)

    def _leave(self, client: WorldClient) -> None:
        for handle, owner in list(self._by_handle.items()):
            if owner is client:
                self.core.cancel(GATEWAY, handle)

    def _receive(self, batch: GatewayBatch) -> None:
        start = 0
        for handle, number in zip(batch.handles, batch.counts, strict=True):
            client = self._by_handle[handle]  # raises KeyError if a message follows the outcome
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
                self._end(client, outcome)

    def _end(self, client: WorldClient, outcome: wire.Outcome) -> None:
        client.final = outcome

    # --- engines ----------------------------------------------------------------------------

    def _perform(self, actions: Actions) -> None:
        for replica_id, dispatches in actions.dispatches.items():
            node = self._nodes[replica_id]
            assert not node.is_cut, "nothing is sent to a replica whose stream is gone"
            self.trace.append(
                (round(self.now, 9), replica_id, *(dispatch.handle for dispatch in dispatches))
            )
            message = convert.submit_message(node.epoch, dispatches)
            self._send(node, partial(node.engine.submit, message.sequences))
        for replica_id, gone in actions.cancels.items():
            node = self._nodes[replica_id]
            if node.is_cut:
                node.cancels += gone
            else:
                self._send(node, partial(node.engine.cancel, gone))
        for replica_id in actions.probes:
            self._probe(replica_id)
        for _, batch in actions.batches:
            self._receive(batch)

    def _send(self, node: _Node, message: Callable[[], None]) -> None:
        epoch = node.epoch

        def arrive() -> None:
            if node.is_alive and not node.is_cut and node.epoch == epoch:
                message()
                self._wake(node)

        self.at(self.now + self._link_s, arrive)

    def _probe(self, replica_id: str) -> None:
        node = self._nodes[replica_id]
        is_over = False

        def answer(tokens: list[int]) -> None:
            nonlocal is_over
            is_over = True
            reply = partial(self._tell_probe, replica_id, tokens)
            self.at(self.now + self._link_s, reply)

        def give_up() -> None:
            if not is_over:
                self.core.on_probe_failed(replica_id, self.now)

        if node.is_alive:
            node.engine.probe(_PROBE_PROMPT, _PROBE_TOKENS, answer)
            self._wake(node)
        self.at(self.now + (_PROBE_TIMEOUT_S if node.is_alive else self._link_s), give_up)

    def _tell_probe(self, replica_id: str, tokens: list[int]) -> None:
        self.core.on_probe(replica_id, CanaryAnswer(Text(tuple(tokens))), self.now)

    def _wake(self, node: _Node) -> None:
        if node.is_stepping or node.is_frozen or not node.is_alive or node.engine.is_idle:
            return
        node.is_stepping = True
        engine, epoch = node.engine, node.epoch
        frame, step_s = engine.step()

        def done() -> None:
            if node.engine is not engine:
                return  # the replica has died
            if node.is_frozen:
                self.at(self.now + 0.05, done)
                return
            node.is_stepping = False
            if node.epoch == epoch:
                self._post(node, frame)
            if node.is_back:
                self._resume(node.replica_id)
            self._wake(node)

        self.at(self.now + step_s, done)

    def _post(self, node: _Node, frame: engine_wire.StepFrame) -> None:
        """Send a frame, whose ends are sent again after a resume until they are confirmed."""
        epoch = node.epoch
        for end in frame.finished:
            node.ends[end.sequence] = end

        def deliver() -> None:
            if node.is_alive and node.epoch == epoch and not node.is_cut:
                self.core.on_frame(node.replica_id, epoch, frame, self.now)
                if frame.finished:
                    self.at(self.now + _CONFIRM_S, confirm)

        def confirm() -> None:
            if node.epoch == epoch and not node.is_cut:
                for end in frame.finished:
                    node.ends.pop(end.sequence, None)
                node.engine.confirm(end.sequence for end in frame.finished)

        self.at(self.now + self._link_s, deliver)

    def _attach(self, replica_id: str) -> None:
        node = self._nodes[replica_id]
        node.epoch += 1
        node.is_cut = False
        node.cancels.clear()
        node.ends.clear()
        node.engine.cancel(node.engine.held)  # a newer epoch cancels the sequences of the older one
        node.engine.confirm(list(node.engine.outputs()))
        self.core.on_attached(replica_id, node.epoch, self.limits, self.now)

    def _resume(self, replica_id: str) -> None:
        node = self._nodes[replica_id]
        if not node.is_cut or not node.is_alive:
            return
        node.is_back = node.is_stepping  # the resume waits for a running step and its output
        if node.is_back:
            return
        old, node.epoch, node.is_cut = node.epoch, node.epoch + 1, False
        resumed = [
            engine_wire.Resumed(sequence=sequence, output=output)
            for sequence, output in node.engine.outputs().items()
        ]
        self.core.on_resumed(replica_id, old, node.epoch, resumed, self.now)
        ends = list(node.ends.values())
        self._post(node, engine_wire.StepFrame(finished=ends, state=node.engine.state()))
        self._send(node, partial(node.engine.cancel, list(node.cancels)))
        node.cancels.clear()

    # --- faults -----------------------------------------------------------------------------

    def _break(self, replica_id: str, fault: Fault) -> None:
        node = self._nodes[replica_id]
        if fault.kind == "die":
            node.is_alive = node.is_stepping = False
            node.engine = SimEngine(self.limits, node.engine.cost)
            node.ends.clear()
            self.core.on_replica_lost(replica_id, node.epoch, self.now)
        elif fault.kind == "freeze":
            node.is_frozen = True
            self.at(self.now + self._silence_s, partial(self._silent, replica_id))
        elif fault.kind == "cut":
            node.is_cut = True
            self.core.on_broken(replica_id, node.epoch)
            self.at(self.now + _RESUME_S, partial(self._resume, replica_id))
        elif fault.kind == "fail":
            node.engine.fail_all()
            self._wake(node)
        elif fault.kind in _SWITCHES:
            _SWITCHES[fault.kind](node.engine, True)
            self._has_lied |= fault.kind == "lie"
        else:
            raise ValueError(fault.kind)

    def _silent(self, replica_id: str) -> None:
        node = self._nodes[replica_id]
        if node.is_frozen:
            self.core.on_replica_lost(replica_id, node.epoch, self.now)

    def _heal(self, replica_id: str) -> None:
        node = self._nodes[replica_id]
        node.is_frozen = False
        node.is_alive = True
        for switch in _SWITCHES.values():
            switch(node.engine, False)
        if self.core.replicas[replica_id].limits is None:
            self._attach(replica_id)
        self._wake(node)


def _is_lie(token: int, expected: int) -> bool:
    return token == expected + 1


def _be_busy(engine: SimEngine, is_on: bool) -> None:
    engine.is_busy_fault = is_on


def _be_slow(engine: SimEngine, is_on: bool) -> None:
    engine.slowness = _SLOWNESS if is_on else 1.0


def _lie(engine: SimEngine, is_on: bool) -> None:
    engine.is_lying = is_on


_SWITCHES = {"busy": _be_busy, "slow": _be_slow, "lie": _lie}
