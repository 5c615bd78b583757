"""Random histories of the core: every accepted request ends once, whatever happens."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core import invariants
from router.core.router import RouterCore
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.core.types.request import Dispatch, Request
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

CELL = "cell"
NAMES = ("one", "two", "three")
LIMITS = EngineLimits(200, 3, 64, 32, 16)
REASONS = (
    engine.FINISH_REASON_STOP,
    engine.FINISH_REASON_LENGTH,
    engine.FINISH_REASON_CANCELLED,
    engine.FINISH_REASON_REFUSED,
    engine.FINISH_REASON_BUSY,
    engine.FINISH_REASON_FAILED,
    engine.FINISH_REASON_UNKNOWN_SPAN,
)


class CoreMachine(RuleBasedStateMachine):
    """The naive model: which handles are open, which sequences each engine holds, what was told."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.core = RouterCore(CoreConfig(queue_requests_max=6, queue_tokens_max=600))
        self.open: dict[tuple[int, int], int] = {}  # (gateway, handle) -> tokens told
        self.engines: dict[str, dict[int, Dispatch]] = {name: {} for name in NAMES}
        self.epochs = dict.fromkeys(NAMES, 0)
        self.attached: set[str] = set()
        self.planned = set(NAMES)
        self.owned = True
        self.handles = 0
        self.gateways: set[int] = set()
        self.keys = 0
        self.engine_tokens: dict[tuple[int, int], list[int]] = {}
        self.told: dict[tuple[int, int], list[int]] = {}
        self.plan()

    def plan(self) -> None:
        plans = [ReplicaPlan(name, CELL) for name in NAMES if name in self.planned]
        self.core.on_cells([CELL] if self.owned else [], plans)

    def settle(self) -> None:
        actions = self.core.tick(self.now)
        for name, dispatches in actions.dispatches.items():
            assert name in self.attached
            for dispatch in dispatches:
                assert dispatch.sequence not in self.engines[name]
                self.engines[name][dispatch.sequence] = dispatch
            assert len(self.engines[name]) <= LIMITS.sequences_max
        for name, gone in actions.cancels.items():
            assert set(gone) <= set(self.engines[name])
        for key, batch in actions.batches:
            start = 0
            for handle, count in zip(batch.handles, batch.counts, strict=True):
                assert (key, handle) in self.open
                self.told[key, handle] += batch.tokens[start : start + count]
                start += count
            for outcome in batch.outcomes:
                assert (key, outcome.handle) in self.open, "one outcome each"
                del self.open[key, outcome.handle]
                told = self.told.pop((key, outcome.handle))
                assert told == self.engine_tokens.pop((key, outcome.handle)), "no token lost"
                if outcome.kind == wire.OUTCOME_KIND_LOST:
                    assert told

    @rule()
    def connect(self):
        if len(self.gateways) < 3:
            self.keys += 1
            self.gateways.add(self.keys)
            self.core.on_gateway(self.keys, self.now)

    @precondition(lambda self: self.gateways)
    @rule(
        data=st.data(),
        prompt=st.integers(1, 250),
        output=st.integers(0, 60),
        priority=st.integers(0, 1),
        tenant=st.sampled_from("ab"),
        deadline_s=st.sampled_from([0.0, 0.5, 5.0]),
        tree=st.sampled_from([0, 100, 200]),
    )
    def submit(self, data, prompt, output, priority, tenant, deadline_s, tree):
        key = data.draw(st.sampled_from(sorted(self.gateways)))
        self.handles += 1
        self.open[key, self.handles] = 0
        self.told[key, self.handles] = []
        self.engine_tokens[key, self.handles] = []
        request = Request(
            handle=self.handles,
            cell_id=CELL,
            tenant_id=tenant,
            priority=priority,
            is_preemptible=not priority,
            prompt_tokens=prompt,
            hashes=range(tree, tree + prompt // LIMITS.block_tokens),
            session=tree // 100,
            output_max=output,
            deadline_s=deadline_s,
        )
        self.core.submit(key, request, self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data):
        key, handle = data.draw(st.sampled_from(sorted(self.open)))
        self.core.cancel(key, handle)

    @precondition(lambda self: self.gateways)
    @rule(data=st.data())
    def gateway_leaves(self, data):
        self.settle()
        key = data.draw(st.sampled_from(sorted(self.gateways)))
        self.gateways.remove(key)
        self.core.on_gateway_gone(key)
        for entry in [entry for entry in self.open if entry[0] == key]:
            del self.open[entry]
            del self.told[entry]
            del self.engine_tokens[entry]

    @rule(name=st.sampled_from(NAMES))
    def attach_or_lose(self, name):
        if name in self.attached:
            self.settle()
            self.attached.remove(name)
            self.engines[name].clear()
            self.core.on_replica_lost(name, self.epochs[name], self.now)
        elif name in self.core.replicas:
            self.epochs[name] += 1
            self.attached.add(name)
            self.core.on_attached(name, self.epochs[name], LIMITS, self.now)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def step(self, data, name):
        if name not in self.attached:
            return
        self.settle()
        held = self.engines[name]
        frame = engine.StepFrame(step=1, steps=1)
        for sequence, dispatch in list(held.items()):
            what = data.draw(st.sampled_from(["nothing", "token", "token", "tokens", "end"]))
            count = {"token": 1, "tokens": 3}.get(what, 0)
            if count:
                frame.admitted.add(sequence=sequence, cached_tokens=count)
                tokens = [len(held)] * count
                frame.sequence.append(sequence)
                frame.count.append(count)
                frame.token.extend(tokens)
                if dispatch.is_open:
                    self.engine_tokens[dispatch.gateway.key, dispatch.handle] += tokens
            elif what == "end":
                reason = data.draw(st.sampled_from(REASONS))
                frame.finished.add(sequence=sequence, reason=reason, output_tokens=dispatch.emitted)
                del held[sequence]
        frame.state.running = len(held)
        self.core.on_frame(name, self.epochs[name], frame, self.now)

    @rule(owned=st.booleans(), planned=st.sets(st.sampled_from(NAMES)))
    def replan(self, owned, planned):
        self.owned, self.planned = owned, planned
        self.plan()
        for name in NAMES:
            if name not in self.core.replicas:
                assert name not in self.attached

    @rule(seconds=st.sampled_from([0.01, 0.3, 3.0, 40.0]))
    def wait(self, seconds):
        self.now += seconds
        self.settle()

    @invariant()
    def the_books_agree(self):
        self.settle()
        invariants.check(self.core)
        assert self.core.live_requests == len(self.open)
        for cell in self.core.cells.values():
            assert cell.queue.requests <= 6 + len(NAMES) * LIMITS.sequences_max
        for name in self.attached:
            assert set(self.core.replicas[name].dispatches) == set(self.engines[name])

    def teardown(self):
        self.core.end_all()
        self.settle()
        assert not self.open, "everything has ended"


CoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestCoreMachine = CoreMachine.TestCase
