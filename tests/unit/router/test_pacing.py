"""When a prompt waits for the sake of those who decode, and by which speed replicas compare."""

import pytest

from router.core.decide import placement
from router.core.fleet.speed import MeanSpeed
from sluice.wire.engine.v1 import engine_pb2 as engine

NAME = "replica-0"
STEP = 2048
DECODE_STEP_S = 0.018
PAUSES_MAX = 8


@pytest.fixture
def engine_world(bench):
    """A replica on which one sequence decodes that has just had its first token."""

    def make(*, token_s: float):
        world = bench(replicas=1, step=STEP, context=100_000, blocks=16_384, tpot_s=0.1)
        book = world.core.replicas[NAME]
        book.speed.decode_step_s, book.speed.token_s = DECODE_STEP_S, token_s
        dispatch = world.dispatch(world.submit(prompt=10, output=1000))
        world.now += 0.02
        state = engine.EngineState(running=1, step_us=20_000, step_prompt_tokens=10)
        world.frame(NAME, tokens={dispatch: [1]}, state=state)
        return world, dispatch

    return make


def decodes_until_sent(world, dispatch, prompt: int) -> int:
    """Return how many decode-only steps come before a prompt, the one in flight included."""
    book = world.core.replicas[NAME]
    assert book.pauses == 0, "the last step computed a prompt"
    handle = world.submit(prompt=prompt)
    state = engine.EngineState(running=1, step_us=round(DECODE_STEP_S * 1e6))
    while handle not in world.order:
        assert book.pauses < 100, "it is never sent"
        world.now += DECODE_STEP_S
        world.frame(NAME, tokens={dispatch: [1]}, state=state)
    return book.pauses + 1  # it is sent during the next one


def test_a_prompt_waits_until_decoding_requests_can_afford_it(engine_world):
    """A full step of it takes 223 ms, 123 ms too long; a decode step leaves 82 ms."""
    world, dispatch = engine_world(token_s=1e-4)
    assert decodes_until_sent(world, dispatch, STEP) == 2


def test_an_unaffordable_prompt_waits_for_some_steps_only(engine_world):
    world, dispatch = engine_world(token_s=1e-4)
    assert decodes_until_sent(world, dispatch, 40 * STEP) == PAUSES_MAX


def test_where_steps_are_short_nothing_waits(engine_world):
    world, dispatch = engine_world(token_s=1e-5)
    assert decodes_until_sent(world, dispatch, 40 * STEP) == 1


def test_an_idle_engine_makes_no_prompt_wait(engine_world):
    world, dispatch = engine_world(token_s=1e-4)
    world.now += DECODE_STEP_S
    world.frame(NAME)  # what decoded has ended; that will be told
    handle = world.submit(prompt=40 * STEP)
    assert world.order == [dispatch.handle, handle]


def test_while_one_replica_must_decode_another_takes_the_prompt(bench):
    world = bench(replicas=2, step=STEP, context=100_000, blocks=16_384)
    for book in world.core.replicas.values():
        book.speed.decode_step_s, book.speed.token_s = DECODE_STEP_S, 1e-4
    dispatch = world.dispatch(world.submit(prompt=10, output=1000))
    state = engine.EngineState(running=1, step_us=20_000, step_prompt_tokens=10)
    world.frame(dispatch.replica_id, tokens={dispatch: [1]}, state=state)
    other = world.dispatch(world.submit(prompt=40 * STEP))
    assert other.replica_id != dispatch.replica_id


# --- by which speed -------------------------------------------------------------------------


@pytest.fixture
def uneven(bench):
    """A replica, and another one that is four times as fast."""
    world = bench(replicas=2, step=STEP, context=100_000, blocks=16_384, sequences=64)
    slow, fast = world.core.replicas.values()
    fast.speed.token_s, slow.speed.token_s = 1e-5, 4e-5
    world.tick(0.2)
    world.core.cells["cell"].renew_mean_speed(world.now)
    return world, slow, fast


def test_a_prompt_costs_the_same_wherever_nothing_is_owed(uneven):
    world, slow, fast = uneven
    usual = MeanSpeed([slow.speed, fast.speed])
    costs = [
        placement.cost_s(book, usual, 3000, 0, 0.0, world.now, is_home=False)
        for book in (slow, fast)
    ]
    assert costs[0] == costs[1]


def test_a_fast_replica_is_not_sent_everything_while_a_slow_one_does_nothing(uneven):
    world, slow, fast = uneven
    queue = fast.speed.prefill_s(6000, 0)
    assert queue + fast.speed.prefill_s(6000, 0) < slow.speed.prefill_s(6000, 0)
    used = {world.dispatch(world.submit(prompt=6000)).replica_id for _ in range(2)}
    assert used == {slow.replica_id, fast.replica_id}


def test_the_faster_replica_gets_more_of_the_owed_work(uneven):
    world, slow, fast = uneven
    for _ in range(200):
        world.submit(prompt=500, tick=False)
    for _ in range(100):  # engines that follow their speed, without a word
        world.tick(0.01)
        for book in (slow, fast):
            ready = [dispatch for dispatch in book.dispatches.values() if not dispatch.emitted]
            done = [dispatch for dispatch in ready if dispatch.dispatched_at <= world.now - 0.05]
            if done:
                ends = dict.fromkeys(done, engine.FINISH_REASON_STOP)
                world.frame(book.replica_id, tokens={s: [1] for s in done}, finished=ends)
    sent = {name: len(dispatches) for name, dispatches in world.sent.items()}
    assert sent[fast.replica_id] > 1.5 * sent[slow.replica_id]
