"""Prompts on one replica, answers on another: when, and what happens when it goes wrong."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.decide.disaggregation import (
    PrefillSplit,
    TransferTimes,
    Whole,
    is_split_better,
    split_cost_s,
    whole_cost_s,
)
from router.core.handovers import FEATURE
from router.core.types.plan import EngineLimits, ReplicaPlan, ReplicaRole
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

STOP = engine.FINISH_REASON_STOP
LENGTH = engine.FINISH_REASON_LENGTH
BLOCK = 16
P, D, D2 = "replica-0", "replica-1", "replica-2"

SECONDS = st.floats(0.0, 100.0)
WHOLES = st.builds(
    Whole,
    backlog_s=SECONDS,
    prefill_s=SECONDS,
    decodes=st.integers(0, 500),
    waiting=st.integers(0, 50),
)
SPLITS = st.builds(
    PrefillSplit,
    backlog_s=SECONDS,
    prefill_s=SECONDS,
    transfer_s=SECONDS,
    output_tokens=st.integers(0, 2000),
    decode_step_s=st.floats(0.0, 0.2),
)


# --- the decision ---------------------------------------------------------------------------


@given(WHOLES, SPLITS)
def test_a_split_is_cheaper_and_keeps_the_pace(whole, split):
    if not is_split_better(whole, split, 0.1):
        return
    assert split_cost_s(split) < whole_cost_s(whole)
    assert split.output_tokens > 1
    pauses_s = split.transfer_s + split.decode_step_s * (split.output_tokens - 1)
    assert not split.transfer_s or pauses_s <= 0.1 * (split.output_tokens - 1) + 1e-6


@given(WHOLES, SPLITS, st.floats(0.0, 10.0))
def test_worse_conditions_never_make_it_better(whole, split, more_s):
    if is_split_better(whole, split, 0.1):
        return
    for name in ("backlog_s", "prefill_s", "transfer_s"):
        worse = dataclasses.replace(split, **{name: getattr(split, name) + more_s})
        assert not is_split_better(whole, worse, 0.1)


def test_busy_decodes_speak_for_a_split_and_short_answers_against_it():
    split = PrefillSplit(0.0, 0.4, 0.1, output_tokens=200, decode_step_s=0.03)
    assert not is_split_better(Whole(0.0, 0.4, decodes=0), split, 0.1)
    assert is_split_better(Whole(0.0, 0.4, decodes=60), split, 0.1)
    short = dataclasses.replace(split, output_tokens=2)
    assert not is_split_better(Whole(0.0, 0.4, decodes=60), short, 0.1)
    waits = dataclasses.replace(split, backlog_s=1.0)
    assert not is_split_better(Whole(0.0, 0.4, decodes=60), waits, 0.1)


def test_no_prefill_replica_idles_beside_a_queue():
    split = PrefillSplit(0.0, 0.05, 0.2, output_tokens=200, decode_step_s=0.03)
    assert not is_split_better(Whole(0.05, 0.05, decodes=1), split, 0.1)
    assert is_split_better(Whole(0.05, 0.05, decodes=1, waiting=5), split, 0.1)


def test_the_time_of_transfers_is_learned():
    times = TransferTimes()
    for _ in range(50):
        times.observe(10_000, 1.01)
    assert times.predict_s(10_000) == pytest.approx(1.01, rel=0.01)
    assert times.predict_s(0) == 0.0


def test_after_failures_none_is_tried_for_longer_and_longer():
    times, now, pauses = TransferTimes(), 0.0, []
    for _ in range(10):
        times.failed(now)
        times.failed(now)  # one that was under way as well
        began = now
        while not times.is_usable(now):
            now += 0.5
        pauses.append(now - began)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == 60.0
    times.observe(100, 0.1)
    times.failed(now)
    assert times.is_usable(now + 1.0)


# --- the life of a split request ------------------------------------------------------------


@pytest.fixture
def world(bench):
    """A prefill replica, two that decode and are busy with answers, and a fast network."""

    def make(*, features=frozenset({FEATURE}), busy=40):
        world = bench(replicas=0, output_tokens_expected=300)
        world.limits = EngineLimits(4000, 64, 512, 4096, BLOCK, features=features)
        world.names = [P, D, D2]
        roles = dict(
            zip(
                world.names,
                (ReplicaRole.PREFILL, ReplicaRole.DECODE, ReplicaRole.DECODE),
                strict=True,
            )
        )
        world.core.on_cells(["cell"], [ReplicaPlan(n, "cell", role=roles[n]) for n in world.names])
        for name in world.names:
            world.attach(name)
        world.transfers = []
        tick = world.tick

        def keep(advance_s=0.0):
            actions = tick(advance_s)
            world.transfers += actions.transfers
            return actions

        world.tick = keep
        for _ in range(busy // 2):  # one each
            for dispatch in [world.dispatch(world.submit(prompt=4, output=900)) for _ in range(2)]:
                name = dispatch.replica_id
                world.frame(
                    name, admitted=[dispatch], tokens={dispatch: [1]}, state=state(world, name)
                )
        for book in world.core.replicas.values():
            book.speed.token_s = 0.001
        world.tick(1.0)
        return world

    return make


def state(world, name: str) -> engine.EngineState:
    return engine.EngineState(running=len(world.core.replicas[name].dispatches))


def submit(world, *, prompt=1000, output=200, **fields) -> int:
    return world.submit(prompt=prompt, output=output, hashes=range(prompt // BLOCK), **fields)


def prefill(world, handle: int, reason=LENGTH, **columns) -> None:
    dispatch = world.dispatch(handle)
    assert dispatch.replica_id == P
    if "logprobs" in columns:
        columns["logprobs"] = [(dispatch, *columns["logprobs"])]
    finished = {dispatch: reason}
    world.frame(P, tokens={dispatch: [77]}, finished=finished, state=state(world, P), **columns)


def test_the_prompt_runs_there_the_answer_here(world):
    world = world()
    handle = submit(world)
    first = world.dispatch(handle)
    assert (first.replica_id, first.output_max) == (P, 1)
    assert first.kv_blocks == -(-1001 // BLOCK)
    prefill(world, handle)
    (transfer,) = world.transfers
    target = transfer.dispatch.replica_id
    assert (transfer.source, transfer.first, transfer.blocks) == (P, 0, 1000 // BLOCK)
    assert target in {D, D2}
    assert world.dispatch(handle) is first  # nothing is sent before the blocks are there
    assert transfer.dispatch.sequence in world.core.replicas[target].dispatches  # but there is room
    world.core.on_transferred(transfer.dispatch.sequence, transfer.blocks, world.now)
    world.tick(0.1)
    second = world.dispatch(handle)
    assert second.replica_id == target
    assert (second.prompt_tokens, second.output_max) == (1001, 199)
    assert second.cached_tokens == 1000 // BLOCK * BLOCK
    world.frame(
        target, tokens={second: [78, 79]}, finished={second: STOP}, state=state(world, target)
    )
    outcome = world.outcome(handle)
    assert (outcome.kind, outcome.output_tokens) == (wire.OUTCOME_KIND_STOP, 3)
    batch = world.batch()
    told = [t for h, t in zip(batch.handles, batch.counts, strict=True) if h == handle]
    assert sum(told) == 3
    assert sum(entry.handle == handle for entry in batch.placed) == 1
    assert not world.core.replicas[P].dispatches


def test_both_parts_bring_their_log_probabilities(world):
    world = world()
    handle = submit(world)
    prefill(world, handle, logprobs=(-0.5, {77: -0.5}))
    (transfer,) = world.transfers
    world.core.on_transferred(transfer.dispatch.sequence, transfer.blocks, world.now)
    world.tick(0.1)
    second = world.dispatch(handle)
    world.frame(
        second.replica_id,
        tokens={second: [78]},
        logprobs=[(second, -0.25, {78: -0.25, 79: -3.0})],
        finished={second: STOP},
    )
    told = world.batch().logprobs
    assert list(told.sequence) == [handle, handle]
    assert list(told.logprob) == [-0.5, -0.25]
    assert list(told.top_count) == [1, 2]


def test_an_answer_that_ends_with_its_first_token_ends(world):
    world = world()
    handle = submit(world)
    prefill(world, handle, reason=STOP)
    assert world.outcome(handle).kind == wire.OUTCOME_KIND_STOP
    assert not world.transfers


@pytest.mark.parametrize("fields", [{"output": 1}, {"prompt": 20}, {"hashes": ()}])
def test_a_request_without_a_gain_stays_whole(world, fields):
    world = world()
    words = {"prompt": 1000, "output": 200, **fields}
    handle = world.submit(**{"hashes": range(words["prompt"] // BLOCK), **words})
    assert world.dispatch(handle).replica_id in {D, D2}


def test_engines_that_cannot_transfer_do_not_split(world):
    world = world(features=frozenset())
    assert world.dispatch(submit(world)).replica_id in {D, D2}


def test_idle_decoders_compute_their_prompts_themselves(world):
    world = world(busy=0)
    assert world.dispatch(submit(world)).replica_id in {D, D2}


@pytest.mark.parametrize("blocks", [0, 10])
def test_a_transfer_that_fails_costs_time_and_nothing_else(world, blocks):
    world = world()
    handle = submit(world)
    prefill(world, handle)
    dispatch = world.transfers[0].dispatch
    world.core.on_transferred(dispatch.sequence, blocks, world.now)
    assert world.core.take_stats().transfers == {"partial" if blocks else "failed": 1}
    world.tick()
    assert world.dispatch(handle) is dispatch
    assert dispatch.prefill_owed == 1001 - blocks * BLOCK
    world.frame(dispatch.replica_id, tokens={dispatch: [78]}, finished={dispatch: STOP})
    assert world.outcome(handle).output_tokens == 2
    assert world.dispatch(submit(world)).replica_id in {D, D2}  # and not at once again
    assert world.dispatch(world.submit(prompt=5)).replica_id in {D, D2}


def test_an_unanswered_transfer_is_given_up(world):
    world = world()
    handle = submit(world)
    prefill(world, handle)
    transfer = world.transfers[0]
    assert world.core.next_tick_at(world.now) <= world.now + transfer.deadline_s + 1.0
    world.tick(transfer.deadline_s + 1.0)
    assert world.dispatch(handle) is transfer.dispatch
    world.core.on_transferred(transfer.dispatch.sequence, transfer.blocks, world.now)  # too late
    world.tick()
    assert world.order.count(handle) == 2


def test_cancelled_on_the_way_its_room_is_free_again(world):
    world = world()
    handle = submit(world)
    prefill(world, handle)
    dispatch = world.transfers[0].dispatch
    world.core.cancel(1, handle)
    world.tick()
    assert world.outcome(handle).kind == wire.OUTCOME_KIND_CANCELLED
    world.core.on_transferred(dispatch.sequence, 0, world.now)
    assert world.core.take_stats().transfers == {"abandoned": 1}
    world.tick()
    assert world.dispatch(submit(world)).replica_id == P  # that was nobody's failure
    assert dispatch.sequence not in world.core.replicas[dispatch.replica_id].dispatches
    assert world.order.count(handle) == 1


def test_a_decoder_lost_on_the_way_is_replaced(world):
    world = world()
    handle = submit(world)
    prefill(world, handle)
    dispatch = world.transfers[0].dispatch
    world.core.on_replica_lost(dispatch.replica_id, 1, world.now)
    world.tick()
    again = world.transfers[1].dispatch
    assert {dispatch.replica_id, again.replica_id} == {D, D2}
    world.core.on_transferred(dispatch.sequence, 62, world.now)  # of the first one
    world.core.on_transferred(again.sequence, 62, world.now)
    world.tick()
    assert world.dispatch(handle) is again
    assert again.prompt_tokens == 1001


def test_a_prefill_replica_lost_before_the_first_token_is_a_retry(world):
    world = world()
    handle = submit(world)
    world.core.on_replica_lost(P, 1, world.now)
    world.tick()
    assert world.dispatch(handle).replica_id in {D, D2}
    assert world.dispatch(handle).prompt_tokens == 1000


def test_with_no_place_to_decode_it_waits_first_in_line(world):
    world = world()
    handle = submit(world)
    for _ in range(200):  # every place
        world.submit(prompt=4, output=900, tenant_id="others")
        for name in (D, D2):
            dispatches = [s for s in world.core.replicas[name].dispatches.values() if not s.emitted]
            world.frame(
                name, tokens={dispatch: [1] for dispatch in dispatches}, state=state(world, name)
            )
    prefill(world, handle)
    assert not world.transfers
    victim = next(iter(world.core.replicas[D].dispatches.values()))
    for _ in range(60):
        victim = next(iter(world.core.replicas[D].dispatches.values()))
        world.frame(D, tokens={victim: [2]}, finished={victim: STOP}, state=state(world, D))
        world.tick(0.1)
        if world.transfers:
            break
    assert world.transfers[0].dispatch.handle == handle
