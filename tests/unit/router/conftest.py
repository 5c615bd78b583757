"""A core with two replicas, and short words for what happens to it."""

from collections.abc import Callable

import pytest

from router.core import invariants
from router.core.router import RouterCore
from router.core.types.actions import Actions
from router.core.types.batch import GatewayBatch
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.core.types.request import Dispatch, Request
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

GATEWAY = 1
CELL = "cell"


class Bench:
    """The core under test with a clock of its own; every step checks the invariants."""

    def __init__(self, *, limits: EngineLimits, replicas: int, **config) -> None:
        self.core = RouterCore(CoreConfig(**config))
        self.limits = limits
        self.now = 100.0
        self.heard: dict[int, GatewayBatch] = {}
        self.sent: dict[str, list[Dispatch]] = {}
        self.cancelled: dict[str, list[int]] = {}
        self.handles = 0
        self.steps = 0
        self.names = [f"replica-{number}" for number in range(replicas)]
        self.core.on_gateway(GATEWAY, self.now)
        self.plan()
        for name in self.names:
            self.attach(name)
        self.tick()

    def plan(self, *, cells=(CELL,), draining: tuple[str, ...] = (), without=()) -> None:
        plans = [
            ReplicaPlan(name, CELL, name in draining) for name in self.names if name not in without
        ]
        self.core.on_cells(cells, plans)

    def attach(self, name: str, epoch: int = 1) -> None:
        self.core.on_attached(name, epoch, self.limits, self.now)

    def tick(self, advance_s: float = 0.0) -> Actions:
        self.now += advance_s
        actions = self.core.tick(self.now)
        for name, dispatches in actions.dispatches.items():
            self.sent.setdefault(name, []).extend(dispatches)
        for name, gone in actions.cancels.items():
            self.cancelled.setdefault(name, []).extend(gone)
        for key, batch in actions.batches:
            self.heard.setdefault(key, GatewayBatch()).merge(batch)
        invariants.check(self.core)
        return actions

    def submit(self, *, gateway=GATEWAY, prompt=10, output=5, tick=True, **fields) -> int:
        self.handles += 1
        words = {"cell_id": CELL, "tenant_id": "tenant", **fields}
        request = Request(handle=self.handles, prompt_tokens=prompt, output_max=output, **words)
        self.core.submit(gateway, request, self.now)
        if tick:
            self.tick()
        return self.handles

    def frame(self, name: str, epoch: int = 1, *, tick=True, **columns) -> None:
        """Deliver a frame: tokens={dispatch: [ids]}, admitted=[...], finished={dispatch: reason}.

        `logprobs` are rows of (dispatch, logprob, {alternative: logprob}).
        """
        self.steps += 1
        frame = engine.StepFrame(step=self.steps, steps=columns.get("steps", 1))
        for dispatch, tokens in columns.get("tokens", {}).items():
            frame.sequence.append(dispatch.sequence)
            frame.count.append(len(tokens))
            frame.token.extend(tokens)
        for dispatch, logprob, top in columns.get("logprobs", ()):
            add_logprobs(frame.logprobs, dispatch.sequence, logprob, top)
        for dispatch in columns.get("admitted", ()):
            frame.admitted.add(
                sequence=dispatch.sequence,
                queue_us=5,
                cached_tokens=columns.get("cached", 3),
                load_us=columns.get("load_us", 0),
            )
        for dispatch, reason in columns.get("finished", {}).items():
            count = dispatch.emitted + len(columns.get("tokens", {}).get(dispatch, ()))
            code, message = columns.get("code", ""), columns.get("message", "")
            frame.finished.add(
                sequence=dispatch.sequence,
                reason=reason,
                output_tokens=count,
                code=code,
                message=message,
                param=columns.get("param", ""),
            )
        frame.state.CopyFrom(columns.get("state", engine.EngineState()))
        self.core.on_frame(name, epoch, frame, self.now)
        if tick:
            self.tick()

    def batch(self, gateway: int = GATEWAY) -> GatewayBatch:
        return self.heard.setdefault(gateway, GatewayBatch())

    def outcome(self, handle: int, gateway: int = GATEWAY) -> wire.Outcome:
        found = [entry for entry in self.batch(gateway).outcomes if entry.handle == handle]
        assert len(found) == 1, f"{len(found)} outcomes"
        return found[0]

    def dispatch(self, handle: int) -> Dispatch:
        """The latest dispatch of a handle."""
        dispatches = [
            dispatch
            for sent in self.sent.values()
            for dispatch in sent
            if dispatch.handle == handle
        ]
        return max(dispatches, key=lambda dispatch: dispatch.sequence)

    @property
    def order(self) -> list[int]:
        """Handles in the order of dispatch."""
        dispatches = [dispatch for sent in self.sent.values() for dispatch in sent]
        return [
            dispatch.handle
            for dispatch in sorted(dispatches, key=lambda dispatch: dispatch.sequence)
        ]


def add_logprobs(
    message: engine.Logprobs, sequence: int, logprob: float, top: dict[int, float]
) -> None:
    message.sequence.append(sequence)
    message.logprob.append(logprob)
    message.top_count.append(len(top))
    message.top_token.extend(top)
    message.top_logprob.extend(top.values())


@pytest.fixture
def bench() -> Callable[..., Bench]:
    def make(
        *, sequences=8, context=1000, blocks=512, replicas=2, step=256, adapter_slots=0, **config
    ) -> Bench:
        limits = EngineLimits(context, sequences, step, blocks, 16, adapter_slots)
        return Bench(limits=limits, replicas=replicas, **config)

    return make
