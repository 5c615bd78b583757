"""Who may wait, who is refused, and who goes when there is no room."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.router import RouterCore
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.core.types.request import Request
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

STOP = engine.FINISH_REASON_STOP
EVICTED = wire.OUTCOME_KIND_EVICTED
REJECTED = wire.OUTCOME_KIND_REJECTED
BATCH = {"is_preemptible": True, "priority": 0}


class Cell:
    """One replica that is full from the start, so that everything else waits."""

    def __init__(
        self, *, adapter_slots: Any = 4, sequences: Any = 1, replicas: Any = 1, **config: Any
    ) -> None:
        self.core = RouterCore(CoreConfig(**config))
        self.now = 100.0
        self.handles = 0
        self.outcomes: dict[int, wire.Outcome] = {}
        names = [f"replica-{number}" for number in range(replicas)]
        self.core.on_gateway(1, self.now)
        self.core.on_cells(["cell"], [ReplicaPlan(name, "cell") for name in names])
        limits = EngineLimits(100_000, sequences, 2048, 100_000, 32, adapter_slots)
        for name in names:
            self.core.on_attached(name, 1, limits, self.now)
        self.cell = self.core.cells["cell"]

    def submit(self, prompt: Any = 100, **fields: Any) -> int:
        self.handles += 1
        words: dict[str, Any] = {
            "cell_id": "cell",
            "tenant_id": "tenant",
            "priority": 5,
            "output_max": 100,
        }
        request = Request(handle=self.handles, prompt_tokens=prompt, **{**words, **fields})
        self.core.submit(1, request, self.now)
        self.tick()
        return self.handles

    def fill(self, **fields: Any) -> None:
        """Occupy every place."""
        while not self.cell.queue.requests:
            self.submit(**fields)
            for book in self.cell.fleet.replicas.values():
                self.frame(book)
        for request in self.cell.queue.waiting():
            self.core.cancel(1, request.handle)
        self.tick()

    def frame(self, book: Any) -> None:
        """A first token of everything."""
        fresh = [dispatch.sequence for dispatch in book.dispatches.values() if not dispatch.emitted]
        state = engine.EngineState(running=len(book.dispatches))
        columns: dict[str, Any] = {
            "sequence": fresh,
            "count": [1] * len(fresh),
            "token": [1] * len(fresh),
        }
        frame = engine.StepFrame(step=1, steps=1, state=state, **columns)
        self.core.on_frame(book.replica_id, 1, frame, self.now)

    def tick(self, advance_s: Any = 0.0) -> None:
        self.now += advance_s
        for _, batch in self.core.tick(self.now).batches:
            self.outcomes.update({entry.handle: entry for entry in batch.outcomes})

    def code(self, handle: int) -> str:
        return self.outcomes[handle].code if handle in self.outcomes else ""

    @property
    def waiting(self) -> list[int]:
        return [request.handle for request in self.cell.queue.waiting()]


# --- what no time can heal ------------------------------------------------------------------


def test_context_adapter_and_capacity_have_codes_of_their_own():
    world = Cell(adapter_slots=0, queue_requests_max=1)
    world.fill()
    assert world.code(world.submit(prompt=100_000)) == "context_length_exceeded"
    assert world.code(world.submit(adapter="a")) == "adapter_not_found"
    world.submit()
    assert world.code(world.submit()) == "queue_full"
    by_handle = {entry.code: entry.retry_after_ms for entry in world.outcomes.values()}
    assert by_handle["context_length_exceeded"] == by_handle["adapter_not_found"] == 0
    assert by_handle["queue_full"] >= 100


def test_before_any_attachment_no_size_is_known_to_fit():
    core = RouterCore(CoreConfig())
    core.on_gateway(1, 0.0)
    core.on_cells(["cell"], [])
    request = Request(handle=1, cell_id="cell", prompt_tokens=10**6, adapter="a")
    core.submit(1, request, 0.0)
    assert core.live_requests == 1


# --- limits of one tenant -------------------------------------------------------------------


def test_a_tenant_has_its_own_limits_in_requests_and_in_tokens():
    world = Cell(tenant_requests_max=3, tenant_tokens_max=1000)
    world.fill()
    for _ in range(3):
        world.submit(tenant_id="a")
    assert world.code(world.submit(tenant_id="a")) == "tenant_queue_full"
    world.submit(tenant_id="b", prompt=900)
    assert world.code(world.submit(tenant_id="b", prompt=200)) == "tenant_queue_full"
    assert world.code(world.submit(tenant_id="c", prompt=2000)) == ""  # one alone is no flood
    assert ErrorCode.TENANT_QUEUE_FULL.policy.status == 429
    refusals = [o for o in world.outcomes.values() if o.code == "tenant_queue_full"]
    assert all(outcome.retry_after_ms >= 100 for outcome in refusals)


@pytest.mark.parametrize("begun", [{"resumed_tokens": 5}, {"is_begun": True}])
def test_a_request_of_a_begun_answer_is_admitted(begun: Any):
    world = Cell(tenant_requests_max=1)
    world.fill()
    world.submit(tenant_id="a")
    payload = wire.Submit(**begun)
    assert world.code(world.submit(tenant_id="a")) == "tenant_queue_full"
    assert world.code(world.submit(tenant_id="a", payload=payload, deadline_s=0.001)) == ""


def test_requests_unknown_to_an_idle_engine_do_not_wait_for_memory(bench: Any):
    world = bench(replicas=1, sequences=64, blocks=4096, deadline_default_s=60.0)
    dispatch = world.dispatch(world.submit())
    done = engine.EngineState(step_us=20_000)
    world.frame("replica-0", tokens={dispatch: [1]}, finished={dispatch: engine.FINISH_REASON_STOP})
    world.now += 1.0
    for _ in range(30):
        world.submit(tick=False)
    world.tick()
    world.now += 0.05  # the host is busy taking them
    world.frame("replica-0", state=done, steps=0)  # a heartbeat, on its way when they were sent
    late = [world.submit(prompt=500) for _ in range(12)]
    assert not [entry for entry in world.batch().outcomes if entry.handle in late]
    assert world.core.replicas["replica-0"].backlog_s(world.now) < 60.0


# --- room in the queue ----------------------------------------------------------------------


def test_batch_goes_first_then_cold_adapters_then_the_lowest_tier():
    world = Cell(queue_requests_max=4)
    world.fill(adapter="warm", priority=9)
    low = world.submit(priority=1)
    cold = world.submit(priority=3, adapter="cold")
    warm = world.submit(priority=2, adapter="warm")
    batch = world.submit(**BATCH)
    for _ in range(4):
        assert world.code(world.submit(priority=9)) == ""
    gone = list(world.outcomes)
    assert [handle for handle in gone if handle in {low, cold, warm, batch}] == [
        *(batch, cold, low, warm)
    ]
    for handle in (low, cold, warm, batch):
        outcome = world.outcomes[handle]
        assert (outcome.kind, outcome.code) == (EVICTED, "overloaded")
        assert outcome.retry_after_ms >= 100
    assert world.code(world.submit(priority=9)) == "queue_full"


def test_no_request_is_shed_when_that_would_not_be_enough():
    world = Cell(queue_tokens_max=1000)
    world.fill()
    world.submit(prompt=800, priority=5)
    low = world.submit(prompt=100, priority=1)
    assert world.code(world.submit(prompt=500, priority=9)) == ""  # the first one goes as well
    assert len(world.waiting) == 1
    low = world.submit(prompt=100, priority=1)
    assert world.code(world.submit(prompt=700, priority=5)) == "queue_full"
    assert low in world.waiting


def test_a_cold_adapter_is_refused_before_the_queue_is_full():
    world = Cell(queue_requests_max=8)
    world.fill(adapter="warm")
    handles = [world.submit() for _ in range(6)]
    outcome = world.outcomes[world.submit(adapter="cold")]
    assert (outcome.kind, outcome.code) == (REJECTED, "overloaded")
    assert "adapter" in outcome.message
    assert world.code(world.submit(adapter="warm")) == ""
    assert world.code(world.submit()) == ""
    assert set(handles) <= set(world.waiting)


TIERS = st.sampled_from([0, 1, 2, 3])
ARRIVALS = st.lists(
    st.tuples(TIERS, st.integers(1, 400), st.sampled_from(["", "x", "y"]), st.sampled_from("ab")),
    max_size=40,
)


@given(ARRIVALS)
def test_no_request_is_refused_for_room_while_enough_lower_tier_work_waits(arrivals: Any):
    world = Cell(queue_requests_max=6, queue_tokens_max=1200)
    world.fill(priority=9)
    for priority, prompt, adapter, tenant in arrivals:
        queue = world.cell.queue
        before = {entry.handle: entry for entry in queue.waiting()}
        below = [entry for entry in before.values() if entry.priority < priority]
        would_fit = (
            queue.requests - len(below) < 6
            and queue.tokens - sum(entry.prompt_tokens for entry in below) + prompt <= 1200
        )
        handle = world.submit(
            prompt,
            priority=priority,
            adapter=adapter,
            tenant_id=tenant,
            is_preemptible=not priority,
        )
        assert queue.requests <= 6
        assert queue.tokens <= 1200
        gone = [before[key] for key in before if key in world.outcomes]
        assert all(entry.priority < priority for entry in gone)
        code = world.code(handle)
        assert (code == "queue_full") == (not would_fit)
        if code:
            assert not gone
        batch_left = any(e.is_preemptible for e in queue.waiting() if e.handle != handle)
        assert not batch_left or all(entry.is_preemptible for entry in gone)


# --- time -----------------------------------------------------------------------------------


def slow(world: Cell, token_s: float) -> None:
    for book in world.cell.fleet.replicas.values():
        book.speed.token_s = token_s
        world.cell.update(book)
    world.tick(0.1)


def test_a_first_token_after_the_deadline_is_refused_at_once():
    world = Cell(sequences=100, deadline_default_s=10.0)
    slow(world, 0.001)
    codes = [world.code(world.submit(prompt=1000)) for _ in range(30)]
    assert codes[:8] == [""] * 8
    assert codes[-1] == "overloaded"
    first = codes.index("overloaded")
    assert set(codes[first:]) == {"overloaded"}
    told = [o.retry_after_ms for o in world.outcomes.values()]
    assert told == sorted(told)  # one after the other
    assert 100 <= told[0] <= 2000
    assert told[-1] <= 30_000
    assert world.code(world.submit(prompt=1000, deadline_s=60.0)) == ""
    assert ErrorCode.OVERLOADED.policy.status == 503


def serve(world: Cell, seconds: float) -> None:
    """An engine that computes one prompt after the other; answers have one token."""
    left: dict[int, float] = {}
    for _ in range(round(seconds / 0.05)):
        world.tick(0.05)
        for book in world.cell.fleet.replicas.values():
            budget = 0.05 * book.tokens_s
            for dispatch in list(book.dispatches.values()):
                owed = left.setdefault(dispatch.sequence, dispatch.prompt_tokens)
                left[dispatch.sequence] = max(0.0, owed - budget)
                budget = max(0.0, budget - owed)
            done = [sequence for sequence in book.dispatches if not left[sequence]]
            owed = sum(left[sequence] for sequence in book.dispatches)
            frame = engine.StepFrame(sequence=done, count=[1] * len(done), token=[1] * len(done))
            for sequence in done:
                frame.finished.add(sequence=sequence, reason=STOP, output_tokens=1)
            frame.state.running = len(book.dispatches) - len(done)
            frame.state.prefill_tokens_owed = int(owed)
            world.core.on_frame(book.replica_id, 1, frame, world.now)


def test_after_the_time_that_was_told_it_is_let_in():
    world = Cell(sequences=100, deadline_default_s=10.0)
    slow(world, 0.001)
    outcome = None
    while outcome is None:
        outcome = world.outcomes.get(world.submit(prompt=1000))
        world.tick(0.01)
    assert world.code(world.submit(prompt=1000)) == "overloaded"
    serve(world, outcome.retry_after_ms / 1000 + 0.3)
    assert world.code(world.submit(prompt=1000)) == ""


# --- the deadline of a tier -----------------------------------------------------------------

TIER = {"admission_s": 1.5}


def admitted(world: Cell, **fields: Any) -> int:
    """Submit until one is refused; return how many were let in."""
    for number in range(100):
        if world.code(world.submit(**fields)):
            return number
    return 100


def test_a_tier_refuses_by_the_wait_and_not_by_a_requests_own_prefill():
    """Prompts of 100 ms each; of equal ones half are taken to go first."""
    world = Cell(sequences=100)
    slow(world, 0.001)
    assert admitted(world, prompt=100, **TIER) == pytest.approx(2 * 15, abs=4)
    assert world.code(world.submit(prompt=100)) == "", "without one the default is the deadline"
    assert world.code(world.submit(prompt=100, priority=9, **TIER)) == "", "nothing is before it"

    world = Cell(sequences=100)
    slow(world, 0.001)
    world.submit(prompt=100)
    world.submit(prompt=100)
    assert world.waiting, "somebody is before it"
    long = world.submit(prompt=8_000, **TIER)
    assert world.code(long) == "", "8 s of prefill of its own are no wait"


def test_a_tier_that_never_rejects_serves_late():
    world = Cell(deadline_default_s=30.0)
    world.fill()
    late = world.submit(**TIER)
    world.tick(29.0)
    assert world.code(late) == ""
    world.tick(1.1)
    assert world.code(late) == "deadline_exceeded"


def test_a_tiers_deadline_above_the_default_is_waited_for():
    world = Cell(deadline_default_s=30.0)
    world.fill()
    patient = world.submit(admission_s=600.0)
    world.tick(599.0)
    assert world.code(patient) == ""
    world.tick(1.1)
    assert world.code(patient) == "deadline_exceeded"


def test_a_tier_does_not_count_the_load_of_an_adapter_as_a_wait():
    world = Cell(sequences=100)
    slow(world, 0.001)
    for _ in range(2):
        world.submit(prompt=100)
    assert world.cell.fleet.cold_load_s("cold") > 0.4
    assert world.code(world.submit(prompt=100, adapter="cold", admission_s=0.4)) == ""
    for _ in range(10):
        world.submit(prompt=100)
    assert world.code(world.submit(prompt=100, adapter="cold", admission_s=0.4)) == "overloaded"


def test_with_an_empty_queue_a_request_is_always_tried():
    world = Cell(sequences=100, deadline_default_s=1.0)
    slow(world, 1.0)
    assert world.code(world.submit(prompt=50_000)) == ""


@pytest.mark.parametrize(("adapter", "code"), [("", ""), ("warm", ""), ("cold", "overloaded")])
def test_a_cold_adapter_has_to_be_in_time_by_a_margin(adapter: Any, code: Any):
    world = Cell(sequences=100, deadline_default_s=10.0)
    world.submit(adapter="warm")
    slow(world, 0.001)
    for _ in range(11):
        world.submit(prompt=1000)
        world.tick(0.01)
    assert world.code(world.submit(prompt=1000, adapter=adapter)) == code


def test_the_top_tier_is_not_shed_while_a_lower_one_runs():
    world = Cell(sequences=4, deadline_default_s=5.0)
    slow(world, 0.001)
    world.fill(priority=1)
    for _ in range(20):
        world.submit(prompt=2000, priority=9)
    assert not world.outcomes.keys() & set(world.waiting)
    assert len(world.waiting) == 20
    assert world.code(world.submit(prompt=2000, priority=1)) == "overloaded"


def test_the_top_tier_is_shed_when_it_is_alone():
    world = Cell(sequences=4, deadline_default_s=5.0)
    slow(world, 0.001)
    world.fill(priority=9)
    codes = [world.code(world.submit(prompt=2000, priority=9)) for _ in range(20)]
    assert "overloaded" in codes


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 5, 9, 9, 9]), st.integers(100, 4000), st.integers(0, 8)),
        min_size=20,
        max_size=60,
    )
)
def test_the_top_tier_is_shed_only_when_it_is_alone(arrivals: Any):
    world = Cell(sequences=4, deadline_default_s=2.0)
    slow(world, 0.0005)
    top = 0
    for priority, prompt, steps in arrivals:
        top = max(top, priority)
        world.tick(0.06)  # what runs is looked at again after 50 ms
        others = [
            dispatch.request.priority
            for book in world.cell.fleet.replicas.values()
            for dispatch in book.dispatches.values()
            if dispatch.is_open
        ]
        code = world.code(world.submit(prompt=prompt, priority=priority))
        if code == "overloaded" and priority == top:
            assert min(others, default=top) >= top
        serve(world, steps * 0.05)


@pytest.mark.parametrize("flood", [10, 1000])
def test_a_flood_of_one_tenant_is_not_anothers_wait(flood: Any):
    world = Cell(sequences=100, deadline_default_s=1e6)
    slow(world, 0.001)
    for _ in range(flood):
        world.submit(prompt=1000, tenant_id="flood")
    light = Request(handle=0, cell_id="cell", prompt_tokens=1000, tenant_id="light", priority=5)
    light_prefill_s = world.cell.price(light).idle_prefill_s
    heavy = Request(handle=0, cell_id="cell", prompt_tokens=1000, tenant_id="flood", priority=5)
    heavy_prefill_s = world.cell.price(heavy).idle_prefill_s
    light_s = world.cell.predict(light, (light_prefill_s, 0.0), world.now).ttft_s()
    assert light_s < 8.0  # its own second, what runs, and one turn of the other
    assert world.cell.predict(heavy, (heavy_prefill_s, 0.0), world.now).ttft_s() > 0.4 * flood


def test_predictions_follow_observations():
    world = Cell(sequences=100, deadline_default_s=1e6)
    slow(world, 0.001)
    for _ in range(20):
        world.submit(prompt=1000)
    request = next(r for r in world.cell.queue.waiting() if r.prediction is not None)
    assert request.prediction is not None
    request.prediction.first_token(30.0)
    assert world.cell.forecast.accuracy(1000, 1000.0).correction() > 1.0
