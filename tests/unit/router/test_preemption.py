"""Whom to interrupt: the least that helps, and nobody in vain."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from router.core.decide.preemption import (
    PREEMPTIONS_MAX,
    PreemptionRoom,
    RunningSequence,
    cheapest,
    fits,
)
from sluice.wire.engine.v1 import engine_pb2 as engine

BATCH = {"is_preemptible": True, "priority": 0, "tenant_id": "batch"}
GOLD = {"priority": 9, "tenant_id": "gold"}
CANCELLED = engine.FINISH_REASON_CANCELLED

RUNNING = st.builds(
    RunningSequence,
    blocks=st.integers(0, 20),
    progress_tokens=st.integers(0, 1000),
    owed_s=st.floats(0.0, 2.0),
    is_ending=st.booleans(),
)


@st.composite
def situations(draw):
    running = draw(st.lists(RUNNING, max_size=7))
    owed_s = sum(entry.owed_s for entry in running)
    room = PreemptionRoom(
        sequences_free=draw(st.integers(-2, 2)),
        blocks_free=draw(st.integers(-10, 30)),
        blocks_needed=draw(st.integers(1, 40)),
        backlog_s=owed_s + draw(st.floats(0.0, 2.0)),
        prefill_s=draw(st.floats(0.0, 1.0)),
    )
    return room, running


def after(
    room: PreemptionRoom, running: list[RunningSequence], stopped: tuple[int, ...]
) -> PreemptionRoom:
    """The room when those that end anyway and `stopped` are gone."""
    gone = [e for index, e in enumerate(running) if e.is_ending or index in stopped]
    return PreemptionRoom(
        room.sequences_free + len(gone),
        room.blocks_free + sum(entry.blocks for entry in gone),
        room.blocks_needed,
        max(0.0, room.backlog_s - sum(entry.owed_s for entry in gone)),
        room.prefill_s,
    )


@given(situations(), st.floats(0.0, 4.0))
def test_an_interrupted_request_is_useful_and_necessary(situation, left_s):
    room, running = situation
    chosen = cheapest(room, running, left_s)
    if chosen is None:
        everybody = tuple(range(len(running)))
        assert not fits(after(room, running, everybody), left_s - 1e-9)
        return
    assert not any(running[index].is_ending for index in chosen)
    assert fits(after(room, running, tuple(chosen)), left_s + 1e-9)
    for fewer in combinations(chosen, max(0, len(chosen) - 1)):
        assert not chosen or not fits(after(room, running, fewer), left_s - 1e-9)


def test_the_least_progress_is_lost():
    running = [
        RunningSequence(blocks=4, progress_tokens=progress, owed_s=0.0, is_ending=False)
        for progress in (900, 20, 500)
    ]
    assert cheapest(PreemptionRoom(0, 0, 4, 0.0, 0.1), running, 1.0) == [1]
    assert sorted(cheapest(PreemptionRoom(0, 0, 8, 0.0, 0.1), running, 1.0) or []) == [1, 2]


def test_one_large_one_instead_of_several_small_ones():
    sizes = [(2, 10), (2, 20), (8, 30)]
    running = [
        RunningSequence(blocks, progress, 0.0, is_ending=False) for blocks, progress in sizes
    ]
    assert cheapest(PreemptionRoom(0, 0, 8, 0.0, 0.1), running, 1.0) == [2]


def test_a_prompt_that_is_still_computed_gives_its_time_back():
    running = [
        RunningSequence(1, progress_tokens=0, owed_s=3.0, is_ending=False),
        RunningSequence(1, progress_tokens=0, owed_s=0.0, is_ending=False),
    ]
    assert cheapest(PreemptionRoom(5, 100, 1, 3.0, 0.2), running, 1.0) == [0]


def finish(world, handle: int, **columns) -> None:
    dispatch = world.dispatch(handle)
    world.frame(dispatch.replica_id, finished={dispatch: CANCELLED}, **columns)


def test_batch_work_is_interrupted_for_a_higher_tier_and_goes_on_later(bench):
    world = bench(replicas=1, sequences=1)
    batch = world.submit(output=50, **BATCH)
    dispatch = world.dispatch(batch)
    world.frame("replica-0", tokens={dispatch: [1, 2, 3]})
    gold = world.submit(**GOLD)
    world.tick(0.1)
    assert world.cancelled["replica-0"] == [dispatch.sequence]
    finish(world, batch)
    assert world.order == [batch, gold]
    done = world.dispatch(gold)
    world.frame("replica-0", tokens={done: [7]}, finished={done: engine.FINISH_REASON_STOP})
    again = world.dispatch(batch)
    assert world.order == [batch, gold, batch]
    assert again.prompt_tokens == 10 + 3
    assert again.output_max == 50 - 3
    assert world.batch().outcomes[0].handle == gold
    assert len(world.batch().outcomes) == 1  # the client of the batch request saw nothing


def test_one_room_is_made_for_one_request(bench):
    world = bench(replicas=1, sequences=3)
    batch = [world.submit(output=500, **BATCH) for _ in range(3)]
    for handle in batch:
        world.frame("replica-0", tokens={world.dispatch(handle): [1]})
    world.submit(**GOLD)
    for _ in range(5):
        world.tick(0.1)
    assert len(world.cancelled["replica-0"]) == 1


def test_several_that_wait_do_not_wait_for_one_another(bench):
    world = bench(replicas=1, sequences=4)
    for _ in range(4):
        world.frame("replica-0", tokens={world.dispatch(world.submit(output=500, **BATCH)): [1]})
    world.tick(0.1)
    gold = [world.submit(tick=False, **GOLD) for _ in range(3)]
    world.tick()
    stopped = world.cancelled["replica-0"]
    assert len(set(stopped)) == len(stopped) == 3
    ended = {
        dispatch: CANCELLED for dispatch in world.sent["replica-0"] if dispatch.sequence in stopped
    }
    world.frame("replica-0", finished=ended)
    assert set(world.order[4:]) == set(gold)
    assert len(world.cancelled["replica-0"]) == 3


def test_no_request_is_interrupted_while_there_is_room(bench):
    world = bench(replicas=2, sequences=2)
    for _ in range(3):
        world.frame("replica-0", tokens={world.dispatch(world.submit(**BATCH)): [1]})
    gold = world.submit(**GOLD)
    assert world.order[-1] == gold
    assert not world.cancelled


def test_other_tiers_and_higher_batch_work_are_left_alone(bench):
    world = bench(replicas=1, sequences=2)
    world.submit(output=500, priority=1, tenant_id="free")
    world.submit(output=500, **{**BATCH, "priority": 9})
    for dispatch in world.sent["replica-0"]:
        world.frame("replica-0", tokens={dispatch: [1]})
    world.submit(**GOLD)
    for _ in range(5):
        world.tick(1.0)
    assert not world.cancelled


def test_no_request_is_interrupted_for_batch_work(bench):
    world = bench(replicas=1, sequences=1)
    world.frame("replica-0", tokens={world.dispatch(world.submit(output=500, **BATCH)): [1]})
    world.submit(**{**BATCH, "priority": 5})
    world.tick(1.0)
    assert not world.cancelled


def test_an_answer_is_interrupted_a_few_times_at_most(bench):
    world = bench(replicas=1, sequences=1)
    batch = world.submit(output=500, **BATCH)
    for count in range(1, PREEMPTIONS_MAX + 1):
        world.frame("replica-0", tokens={world.dispatch(batch): [count]})
        gold = world.submit(**GOLD)
        world.tick(0.1)
        assert len(world.cancelled["replica-0"]) == count
        finish(world, batch)
        done = world.dispatch(gold)
        world.frame("replica-0", tokens={done: [7]}, finished={done: engine.FINISH_REASON_STOP})
        assert world.order[-1] == batch
    world.frame("replica-0", tokens={world.dispatch(batch): [9]})
    gold = world.submit(**GOLD)
    world.tick(1.0)
    assert len(world.cancelled["replica-0"]) == PREEMPTIONS_MAX
    dispatch = world.dispatch(batch)
    world.frame("replica-0", tokens={dispatch: [5]}, finished={dispatch: engine.FINISH_REASON_STOP})
    assert world.outcome(batch).output_tokens == PREEMPTIONS_MAX + 2
    assert world.order[-1] == gold
