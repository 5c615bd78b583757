"""What the router's core promises when a replica fails, refuses, comes back or leaves."""

import pytest

from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

STOP = engine.FINISH_REASON_STOP
BUSY = engine.FINISH_REASON_BUSY
FAILED = engine.FINISH_REASON_FAILED


def test_a_lost_replica_moves_unemitted_requests(bench):
    world = bench(step=4096)
    handles = [world.submit() for _ in range(6)]
    moved = [handle for handle in handles if world.dispatch(handle).replica_id == "replica-0"]
    emitted = world.dispatch(moved[0])
    world.frame("replica-0", tokens={emitted: [1, 2]})
    world.core.on_replica_lost("replica-0", 1, world.now)
    world.tick()
    outcome = world.outcome(moved[0])
    assert (outcome.kind, outcome.code) == (wire.OUTCOME_KIND_LOST, "replica_lost")
    assert outcome.output_tokens == 2
    for handle in moved[1:]:
        assert world.dispatch(handle).replica_id == "replica-1"
    assert world.core.lifecycle.stats.requeues == len(moved) - 1


def test_returned_requests_go_first(bench):
    world = bench(replicas=2, sequences=2)
    first = [world.submit() for _ in range(4)]
    late = world.submit()
    world.core.on_replica_lost("replica-0", 1, world.now)
    world.tick()
    for _ in range(3):
        book = world.core.replicas["replica-1"]
        dispatch = next(iter(book.dispatches.values()))
        world.frame("replica-1", tokens={dispatch: [1]}, finished={dispatch: STOP})
    assert set(world.order[:6]) == set(first)
    assert world.order[-1] == late


def test_retries_are_bounded(bench):
    world = bench(replicas=1, retries_max=2)
    handle = world.submit()
    for epoch in range(1, 4):
        assert world.core.live_requests == 1
        world.core.on_replica_lost("replica-0", epoch, world.now)
        world.attach("replica-0", epoch + 1)
        world.tick()
    outcome = world.outcome(handle)
    assert (outcome.kind, outcome.code) == (wire.OUTCOME_KIND_FAILED, "replica_lost")


def test_a_failed_sequence_is_tried_elsewhere(bench):
    world = bench()
    handle = world.submit()
    dispatch = world.dispatch(handle)
    world.frame(dispatch.replica_id, finished={dispatch: FAILED})
    assert world.dispatch(handle).replica_id != dispatch.replica_id
    again = world.dispatch(handle)
    world.frame(again.replica_id, tokens={again: [1]}, finished={again: FAILED})
    assert world.outcome(handle).kind == wire.OUTCOME_KIND_LOST


def test_a_caller_gets_the_last_failure_without_its_place(bench):
    world = bench(retries_max=1)
    handle = world.submit()
    for _ in range(2):
        dispatch = world.dispatch(handle)
        world.frame(dispatch.replica_id, finished={dispatch: FAILED}, message="out of luck")
    outcome = world.outcome(handle)
    assert (outcome.kind, outcome.code) == (wire.OUTCOME_KIND_FAILED, "engine_failed")
    assert outcome.message == "gave up after 2 attempts; last: the replica: out of luck"


def test_the_message_of_an_engine_reaches_the_caller_unchanged(bench):
    world = bench(replicas=1, retries_max=0)
    handle = world.submit()
    message = "no adapter replica-0: replica replica-0"
    world.frame("replica-0", finished={world.dispatch(handle): FAILED}, message=message)
    said = world.outcome(handle).message
    assert said == f"gave up after 1 attempts; last: the replica: {message}"


def test_a_busy_answer_is_no_failure_and_pauses_the_replica(bench):
    world = bench(replicas=1, retries_max=0)
    handle = world.submit()
    for _ in range(5):
        dispatch = world.dispatch(handle)
        world.frame("replica-0", finished={dispatch: BUSY}, tick=False)
        world.tick()
        assert world.dispatch(handle) is dispatch
        due = world.core.next_tick_at(world.now)
        world.tick(due - world.now)
        assert world.dispatch(handle) is not dispatch
    assert world.core.live_requests == 1


def test_refused_is_final(bench):
    world = bench()
    handle = world.submit()
    dispatch = world.dispatch(handle)
    world.frame(dispatch.replica_id, finished={dispatch: engine.FINISH_REASON_REFUSED})
    outcome = world.outcome(handle)
    assert (outcome.kind, outcome.code) == (wire.OUTCOME_KIND_FAILED, "engine_refused")


def test_a_refused_caller_gets_the_reason_and_no_replica(bench):
    world = bench()
    handle = world.submit()
    refused = {world.dispatch(handle): engine.FINISH_REASON_REFUSED}
    replica_id = world.dispatch(handle).replica_id
    why = {"code": "invalid_request", "message": "no such grammar", "param": "grammar"}
    world.frame(replica_id, finished=refused, **why)
    outcome = world.outcome(handle)
    assert {name: getattr(outcome, name) for name in why} == why


def test_a_draining_replica_gets_nothing_new(bench):
    world = bench(sequences=100, step=4096)
    world.plan(draining=("replica-0",))
    for _ in range(5):
        assert world.dispatch(world.submit()).replica_id == "replica-1"


def test_frames_of_an_older_attachment_count_for_nothing(bench):
    world = bench(replicas=1)
    handle = world.submit()
    dispatch = world.dispatch(handle)
    world.core.on_replica_lost("replica-0", 1, world.now)
    world.attach("replica-0", 2)
    world.tick()
    world.frame("replica-0", epoch=1, tokens={dispatch: [1]}, finished={dispatch: STOP})
    assert world.batch().tokens == []
    assert world.core.live_requests == 1
    assert world.core.lifecycle.stats.stray_tokens == 0  # ignored as a whole


def resumed(*entries: tuple[int, list[int]]) -> list[engine.Resumed]:
    return [engine.Resumed(sequence=sequence, output=output) for sequence, output in entries]


def test_a_resumed_attachment_costs_no_token_and_no_retry(bench):
    world = bench(replicas=1, sequences=4, step=4096)
    goes_on, ended, lost_on_the_way = (world.submit() for _ in range(3))
    a, b, c = (world.dispatch(handle) for handle in (goes_on, ended, lost_on_the_way))
    world.frame("replica-0", tokens={a: [1], b: [2]})
    world.core.on_broken("replica-0", 1)
    waits = world.submit()
    assert waits not in world.order, "nothing is sent into the void"
    world.core.on_resumed("replica-0", 1, 2, resumed((a.sequence, [1, 10, 11])), world.now)
    world.tick()
    assert world.batch().tokens == [1, 2, 10, 11]
    world.frame("replica-0", epoch=2, tokens={b: [20]}, finished={b: STOP})
    assert world.outcome(ended).output_tokens == 2
    assert world.dispatch(lost_on_the_way) is not c, "it is sent again"
    world.frame("replica-0", epoch=2, tokens={a: [12]}, finished={a: STOP})
    assert world.outcome(goes_on).output_tokens == 4
    assert world.core.take_stats().count_mismatches == 0


def test_a_cancel_that_got_lost_is_said_again_at_the_resume(bench):
    world = bench(replicas=1)
    handle = world.submit()
    dispatch = world.dispatch(handle)
    world.core.cancel(1, handle)
    world.tick()
    world.core.on_broken("replica-0", 1)
    world.core.on_resumed("replica-0", 1, 2, resumed((dispatch.sequence, [5])), world.now)
    world.tick()
    assert world.cancelled["replica-0"] == [dispatch.sequence] * 2
    assert not world.batch().tokens


def test_a_resumed_sequence_that_has_lost_tokens_is_an_error(bench):
    world = bench(replicas=1)
    dispatch = world.dispatch(world.submit())
    world.frame("replica-0", tokens={dispatch: [1, 2]})
    world.core.on_broken("replica-0", 1)
    with pytest.raises(ValueError, match="shorter"):
        world.core.on_resumed("replica-0", 1, 2, resumed((dispatch.sequence, [1])), world.now)


def test_work_left_on_an_engine_by_the_last_owner_counts(bench):
    world = bench(replicas=1, sequences=4, blocks=100, step=256)
    left_behind = engine.EngineState(
        running=2, waiting=1, kv_blocks_used=90, prefill_tokens_owed=5000, step_us=20_000
    )
    world.frame("replica-0", state=left_behind)
    book = world.core.replicas["replica-0"]
    assert book.owed_tokens(world.now) == 5000 - 256 + 2, "the next step has begun already"
    first = world.submit(prompt=320)
    assert first not in world.order, "neither its window nor its memory is free"
    world.now += 0.02
    world.frame("replica-0", state=engine.EngineState(step_us=20_000))
    assert world.order == [first]


def ended(world) -> set[int]:
    return {entry.handle for entry in world.batch().outcomes}


def test_a_request_with_an_alternative_does_not_wait_long_for_replicas(bench):
    world = bench(replicas=0)
    stays, leaves = world.submit(), world.submit(absence_s=3.0)
    world.tick(2.9)
    assert leaves not in ended(world)
    world.tick(0.1)
    assert world.outcome(leaves).code == "no_capacity"
    world.tick(5.0)
    assert world.outcome(world.submit(absence_s=3.0)).code == "no_capacity", "at once"
    assert stays not in ended(world)


def test_work_of_a_draining_replica_stays_there(bench):
    world = bench(replicas=1, sequences=1)
    computed, waiting = (world.submit(absence_s=3.0) for _ in range(2))
    dispatch = world.dispatch(computed)
    world.plan(draining=("replica-0",))
    for _ in range(5):
        world.tick(1.0)
    assert world.outcome(waiting).code == "no_capacity"
    assert computed not in ended(world)
    world.core.on_replica_lost("replica-0", 1, world.now)
    world.tick(1.0)
    assert world.outcome(computed).code == "no_capacity"
    assert dispatch.is_open is False


def test_replicas_that_were_there_meanwhile_are_waited_for_anew(bench):
    world = bench(replicas=1, sequences=1)
    world.core.on_replica_lost("replica-0", 1, world.now)
    first = world.submit(absence_s=3.0)
    world.tick(2.0)
    world.attach("replica-0", 2)  # ... and takes the first one
    world.tick()
    second = world.submit(absence_s=3.0)
    world.tick(10.0)
    assert not {first, second} & ended(world)
    world.core.on_replica_lost("replica-0", 2, world.now)
    for _ in range(3):
        world.tick(1.0)
    assert not {first, second} & ended(world)
    world.tick(1.0)
    assert {world.outcome(it).code for it in (first, second)} == {"no_capacity"}


def test_a_cell_that_comes_back_has_its_replicas_waited_for_anew(bench):
    world = bench(replicas=0)
    world.submit(absence_s=3.0)
    world.tick(2.0)
    world.plan(cells=())
    world.tick(100.0)
    world.plan()
    handle = world.submit(absence_s=3.0)
    world.tick(2.0)
    assert handle not in ended(world)


def test_a_prompt_that_an_engine_knew_only_in_part_is_sent_to_it_again_at_once(bench):
    world = bench(replicas=1, retries_max=0)
    handle = world.submit()
    for _ in range(3):
        dispatch = world.dispatch(handle)
        world.frame("replica-0", finished={dispatch: engine.FINISH_REASON_UNKNOWN_SPAN})
        assert world.dispatch(handle) is not dispatch, "without a pause, as it is neither busy"
    assert world.core.replicas["replica-0"].busy_until <= world.now
    world.frame("replica-0", tokens={world.dispatch(handle): [1]})
    assert not world.dispatch(handle).request.interrupted
