"""Explanations: what placement saw, in its order, with a reason; asking changes nothing."""

import pickle
from inspect import isdatadescriptor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.core.cell import CellBook
from router.core.explain.explain import explain
from router.core.handovers import FEATURE
from router.core.types.plan import EngineLimits, ReplicaPlan, ReplicaRole
from router.core.types.request import Request
from sluice.wire.engine.v1 import engine_pb2 as engine

CELL = "cell"
HASHES = tuple(range(1000, 1060))
STOP = engine.FINISH_REASON_STOP


def asked(**fields) -> Request:
    words = {"handle": 0, "cell_id": CELL, "prompt_tokens": 100, "tenant_id": "tenant"}
    return Request(**words | fields)


def told(world, what):
    return explain(world.core, what, world.now)


def by_name(explanation):
    return {candidate.replica_id: candidate for candidate in explanation.candidates}


def test_a_request_that_might_come_is_told_where_it_would_go(bench):
    world = bench(replicas=3, sequences=100, step=4096)
    busy = world.dispatch(world.submit(prompt=900)).replica_id
    explanation = told(world, asked(request_id="maybe", prompt_tokens=900))
    assert (explanation.state, explanation.request_id) == ("admitted", "maybe")
    assert explanation.chosen == explanation.candidates[0].replica_id != busy
    assert explanation.candidates[-1].replica_id == busy
    assert not any(candidate.excluded_by for candidate in explanation.candidates)
    assert "least cost" in explanation.reason
    assert explanation.predicted_ttft_ms > 0
    assert explanation.deadline_left_ms == 30_000
    assert by_name(explanation)[busy].active == 1


def test_cached_tokens_and_the_session_are_shown(bench):
    world = bench(replicas=2, sequences=100, step=4096)
    first = world.submit(prompt=960, hashes=HASHES, session=7)
    home = world.dispatch(first).replica_id
    world.frame(home, tokens={world.dispatch(first): [1]}, state=engine.EngineState(running=1))
    explanation = told(world, asked(prompt_tokens=990, hashes=HASHES, session=7))
    best = explanation.candidates[0]
    assert (best.replica_id, best.cached_tokens, best.is_session_home) == (home, 960, True)
    assert "960 prompt tokens are cached there; its session was there" in explanation.reason
    other = explanation.candidates[1]
    assert (other.cached_tokens, other.is_session_home) == (0, False)
    assert best.prefill_us < other.prefill_us
    assert best.cost_us < other.cost_us


def test_every_exclusion_is_named(bench):
    world = bench(replicas=4, sequences=2, step=4096, context=1000, blocks=100)
    world.plan(draining=("replica-0",))
    for handle in (world.submit(), world.submit()):
        assert world.dispatch(handle)
    world.core.on_replica_lost("replica-3", 1, world.now)
    world.tick()
    crowded = [name for name in ("replica-1", "replica-2") if len(world.sent.get(name, ())) == 2]
    for name in ("replica-1", "replica-2"):
        while len(world.core.replicas[name].dispatches) < 2:
            world.submit()
    reasons = {
        name: candidate.excluded_by for name, candidate in by_name(told(world, asked())).items()
    }
    assert reasons == {
        "replica-0": "draining",
        "replica-1": "sequences",
        "replica-2": "sequences",
        "replica-3": "not attached",
    }, crowded
    with_adapter = by_name(told(world, asked(adapter="a" * 64)))
    assert with_adapter["replica-1"].excluded_by == "sequences"


def test_no_room_in_the_cache_and_windows_are_named(bench):
    world = bench(replicas=1, blocks=20, step=4096, output_tokens_expected=32)
    world.submit(prompt=200)
    explanation = told(world, asked(prompt_tokens=200))
    assert explanation.candidates[0].excluded_by == "kv"
    assert explanation.reason == "no replica can take it: 1 kv"
    assert explanation.chosen == ""
    world = bench(replicas=1, sequences=100, step=64)
    for _ in range(10):
        world.submit(prompt=64)
    explanation = told(world, asked())
    assert explanation.candidates[0].excluded_by == "window"
    assert explanation.requests_ahead > 0
    assert "are busy" in explanation.reason
    assert explanation.predicted_ttft_ms >= explanation.predicted_queue_ms > 0


def test_a_refusal_is_told_with_its_code_and_the_time_to_come_back(bench):
    world = bench(replicas=1, sequences=1, queue_requests_max=2)
    for _ in range(3):
        world.submit()
    explanation = told(world, asked())
    assert (explanation.state, explanation.code) == ("rejected", "queue_full")
    assert explanation.retry_after_ms > 0
    assert "try again" in explanation.reason
    too_long = told(world, asked(prompt_tokens=5000))
    assert (too_long.state, too_long.code) == ("rejected", "context_length_exceeded")
    elsewhere = told(world, asked(cell_id="of-somebody-else"))
    assert (elsewhere.state, elsewhere.code) == ("rejected", "unavailable")
    assert not elsewhere.candidates


def test_a_request_is_followed_from_the_queue_to_its_end(bench):
    world = bench(replicas=1, sequences=1)
    first = world.submit(request_id="first")
    world.submit(request_id="second", prompt=20)
    queued = told(world, "second")
    assert (queued.state, queued.chosen, queued.cell_id) == ("queued", "", CELL)
    assert queued.reason.endswith("no replica can take it: 1 sequences")
    placed = told(world, "first")
    assert (placed.state, placed.chosen) == ("placed", "replica-0")
    assert "its prefill takes" in placed.reason
    assert placed.reason.endswith("; replicas as they are now")
    dispatch = world.dispatch(first)
    world.frame("replica-0", admitted=[dispatch], tokens={dispatch: [1, 2]})
    running = told(world, "first")
    assert (running.state, running.deadline_left_ms) == ("running", 0)
    assert "3 of 10 prompt tokens cached; 2 tokens so far" in running.reason
    world.frame("replica-0", finished={dispatch: STOP})
    gone = told(world, "first")
    assert (gone.state, len(gone.candidates)) == ("unknown", 0)
    assert "may have ended" in gone.reason
    assert told(world, "second").state == "placed"


def test_failed_attempts_are_told(bench):
    world = bench(replicas=1, sequences=1)
    world.submit(request_id="it")
    world.core.on_replica_lost("replica-0", 1, world.now)
    world.tick()
    explanation = told(world, "it")
    assert explanation.state == "queued"
    assert "1 attempts failed, the last on replica-0" in explanation.reason
    assert "1 not attached" in explanation.reason


def test_one_of_so_many_placements_is_explained_to_the_gateway(bench):
    world = bench(replicas=3, sequences=100, step=4096, decision_sample=2)
    handles = [world.submit(request_id=f"r{number}") for number in range(6)]
    decisions = [world.dispatch(handle).decision for handle in handles]
    assert [decision is not None for decision in decisions] == [False, True] * 3
    dispatch = world.dispatch(handles[1])
    decision = dispatch.decision
    assert decision is not None
    assert (decision.chosen, decision.request_id, decision.state) == (
        dispatch.replica_id,
        "r1",
        "placed",
    )
    assert decision.candidates[0].replica_id == dispatch.replica_id
    assert len(decision.candidates) == 3
    assert told(world, "r1").reason.endswith("; replicas as they were when it was placed")
    world.frame(dispatch.replica_id, admitted=[dispatch])
    [placed] = [entry for entry in world.batch().placed if entry.handle == handles[1]]
    assert placed.decision == decision


def test_traced_and_troubled_requests_are_explained_now_and_then(bench):
    world = bench(replicas=3, sequences=100, step=4096, decision_pause_s=1.0)
    plain, first, soon = (world.submit(is_traced=traced) for traced in (False, True, True))
    decisions = [world.dispatch(handle).decision for handle in (plain, first, soon)]
    assert [decision is not None for decision in decisions] == [False, True, False]
    world.tick(1.0)
    lost = world.dispatch(plain)
    world.core.on_replica_lost(lost.replica_id, 1, world.now)
    world.tick()
    decision = next(
        d for h in (plain, first, soon) if (d := world.dispatch(h).decision) and d.reason[0] == "1"
    )
    assert f"1 attempts failed, the last on {lost.replica_id}; least cost" in decision.reason


def test_a_failed_request_keeps_the_rest_of_its_decision_to_the_end(bench):
    world = bench(replicas=1, sequences=100, step=4096)
    good, slow, lost = (world.submit(prompt=20) for _ in range(3))
    world.frame("replica-0", admitted=[world.dispatch(good)], tokens={world.dispatch(good): [1]})
    world.frame("replica-0", finished={world.dispatch(good): STOP})
    world.tick(5.0)
    dispatch = world.dispatch(slow)
    world.frame("replica-0", tokens={dispatch: [1], world.dispatch(lost): [1]})
    world.frame("replica-0", finished={dispatch: STOP})
    world.core.on_replica_lost("replica-0", 1, world.now)
    world.tick()
    told_of = {it.handle: it for it in world.batch().outcomes}
    assert not told_of[good].HasField("decision")
    for handle in (slow, lost):
        decision = told_of[handle].decision
        assert (decision.chosen, decision.state) == ("replica-0", "placed")
        assert [it.replica_id for it in decision.candidates] == ["replica-0"]
        assert "replicas were not kept" in decision.reason


def test_decisions_of_slow_requests_are_sampled_and_of_failed_ones_always_reported(bench):
    world = bench(replicas=1, sequences=100, step=4096, decision_pause_s=0.05)
    slow = [world.submit(prompt=20) for _ in range(8)]
    dispatches = [world.dispatch(handle) for handle in slow]
    world.tick(5.0)
    world.frame("replica-0", admitted=dispatches, tokens={dispatch: [1] for dispatch in dispatches})
    world.frame("replica-0", finished=dict.fromkeys(dispatches[:3], STOP))
    world.tick(0.06)
    world.frame("replica-0", finished=dict.fromkeys(dispatches[3:6], STOP))
    world.core.on_replica_lost("replica-0", 1, world.now)
    world.tick()
    told_of = {it.handle: it.HasField("decision") for it in world.batch().outcomes}
    assert [told_of[handle] for handle in slow] == [True, False, False] * 2 + [True, True]


def test_nothing_is_explained_unasked(bench):
    world = bench(replicas=2)
    assert world.dispatch(world.submit()).decision is None


@pytest.fixture
def split_world(bench):
    """A prefill replica and two busy ones that decode."""
    world = bench(replicas=0, output_tokens_expected=300, decision_sample=1)
    world.limits = EngineLimits(4000, 64, 512, 4096, 16, features=frozenset({FEATURE}))
    world.names = ["prefill", "decode-1", "decode-2"]
    roles = (ReplicaRole.PREFILL, ReplicaRole.DECODE, ReplicaRole.DECODE)
    plans = [
        ReplicaPlan(name, CELL, role=role) for name, role in zip(world.names, roles, strict=True)
    ]
    world.core.on_cells([CELL], plans)
    for name in world.names:
        world.attach(name)
    for _ in range(20):  # one each
        for dispatch in [world.dispatch(world.submit(prompt=4, output=900)) for _ in range(2)]:
            running = len(world.core.replicas[dispatch.replica_id].dispatches)
            state = engine.EngineState(running=running)
            world.frame(dispatch.replica_id, tokens={dispatch: [1]}, state=state)
    for book in world.core.replicas.values():
        book.speed.token_s = 0.001
    world.tick(1.0)
    return world


def test_a_request_on_two_replicas_is_explained(split_world):
    world = split_world
    fields = {"hashes": range(62), "request_id": "split"}
    expected = told(world, asked(prompt_tokens=1000, output_max=200, **fields))
    handle = world.submit(prompt=1000, output=200, **fields)
    decision = world.dispatch(handle).decision
    for explanation in (expected, decision):
        assert explanation.chosen == "prefill"
        assert "cheaper on two replicas: prefill computes the prompt" in explanation.reason
        assert by_name(explanation)["prefill"].excluded_by == "role"
        assert explanation.candidates[0].replica_id in {"decode-1", "decode-2"}
    dispatch = world.dispatch(handle)
    world.frame("prefill", tokens={dispatch: [7]}, finished={dispatch: engine.FINISH_REASON_LENGTH})
    [follower] = [
        dispatch
        for name in ("decode-1", "decode-2")
        for dispatch in world.core.replicas[name].dispatches.values()
        if dispatch.handle == handle
    ]
    assert follower.decision is not None
    assert follower.decision.chosen == follower.replica_id
    assert "its prompt was computed on prefill" in follower.decision.reason


def books(world) -> bytes:
    """What must not change when somebody asks, as far as later decisions can see it."""
    cell = world.core.cells[CELL]
    values = [
        (cell.uncached_mean, cell.answers.mean, cell.queue.requests, cell.queue.tokens),
        [entry.correction() for entry in cell.forecast._accuracies],
        dict(cell.forecast.promises._until),
        (world.core.dispatcher.sequences, world.core.live_requests, len(cell.fleet.index)),
        [
            (book.replica_id, book.kv_booked, len(book.dispatches))
            for book in cell.fleet.replicas.values()
        ],
        (world.core.next_tick_at(world.now), world.core.lifecycle._orders),
    ]
    return pickle.dumps(values)


@st.composite
def requests(draw) -> dict:
    hashed = draw(st.integers(0, 40))
    return {
        "prompt": draw(st.integers(1, 40)) * 16 + 15 + 16 * hashed,
        "hashes": HASHES[:hashed],
        "session": draw(st.integers(0, 2)),
        "tenant_id": draw(st.sampled_from("ab")),
        "priority": draw(st.integers(0, 1)),
        "deadline_s": draw(st.sampled_from([0.0, 0.001])),
    }


@pytest.fixture
def worlds(bench):
    """Makes a new one for every example."""
    return lambda: bench(
        replicas=3, sequences=3, step=512, context=2000, blocks=300, queue_requests_max=5
    )


@given(coming=st.lists(requests(), min_size=1, max_size=12), last=requests())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_explanation_predicts_the_placement_and_changes_nothing(worlds, coming, last):
    world = worlds()
    for fields in coming:
        world.submit(**fields)
        world.tick(0.01)
    words = {"prompt_tokens" if name == "prompt" else name: last[name] for name in last}
    before = books(world)
    explanation = told(world, asked(**words, output_max=5))
    assert books(world) == before
    handle = world.submit(**last)
    outcomes = {outcome.handle: outcome for outcome in world.batch().outcomes}
    dispatches = [
        dispatch for sent in world.sent.values() for dispatch in sent if dispatch.handle == handle
    ]
    if explanation.state == "rejected":
        assert outcomes[handle].code == explanation.code
        assert outcomes[handle].retry_after_ms == pytest.approx(explanation.retry_after_ms, abs=1)
        return
    assert handle not in outcomes
    if explanation.chosen:
        assert dispatches[0].replica_id == explanation.chosen
    elif explanation.requests_ahead:
        assert "are served before it" in explanation.reason
        assert "reserved for others" not in explanation.reason
    else:
        assert not dispatches


def test_a_cell_aside_has_the_same_books_and_a_forecast_of_its_own(bench):
    cell = bench(replicas=1).core.cells[CELL]
    aside = cell.aside()
    names = {name for name, it in vars(CellBook).items() if isdatadescriptor(it)}
    assert len(names) > 15
    assert [it for it in names if getattr(aside, it) != getattr(cell, it)] == ["forecast"]
