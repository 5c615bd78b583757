"""One test per promise of the router's core."""

from itertools import pairwise

import pytest

from router.core import dispatch
from router.core.types.plan import EngineLimits
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from tests.unit.router.conftest import Bench

STOP = engine.FINISH_REASON_STOP


def test_tokens_reach_the_gateway_in_columns(bench):
    world = bench(replicas=1)
    first, second = world.submit(), world.submit()
    a, b = world.dispatch(first), world.dispatch(second)
    world.frame("replica-0", admitted=[a, b], tokens={a: [1, 2], b: [3]})
    world.frame("replica-0", tokens={b: [4]}, finished={b: STOP})
    batch = world.batch()
    assert (batch.handles, batch.counts, batch.tokens) == ([1, 2, 2], [2, 1, 1], [1, 2, 3, 4])
    placed = {entry.handle: entry for entry in batch.placed}
    assert placed[first].replica_id == "replica-0"
    assert placed[first].cached_tokens == 3
    outcome = world.outcome(second)
    assert (outcome.kind, outcome.output_tokens) == (wire.OUTCOME_KIND_STOP, 2)


def test_a_gateway_hears_how_long_an_adapter_was_waited_for(bench):
    world = bench(replicas=1)
    cold, warm = world.submit(), world.submit()
    world.frame("replica-0", admitted=[world.dispatch(cold)], load_us=4)
    world.frame("replica-0", admitted=[world.dispatch(warm)])
    placed = {it.handle: (it.engine_queue_us, it.load_us) for it in world.batch().placed}
    assert placed == {cold: (5, 4), warm: (5, 0)}


@pytest.mark.parametrize(("look_ahead", "waits"), [(None, False), (1, True)])
def test_a_request_without_a_slot_for_its_adapter_holds_up_no_other_tenant(
    monkeypatch, look_ahead, waits
):
    """What the look-ahead is for: without it, all wait until the running answer has ended."""
    if look_ahead is not None:
        monkeypatch.setattr(dispatch, "_LOOK_AHEAD", look_ahead)
    world = Bench(limits=EngineLimits(1000, 8, 256, 512, 16, adapter_slots=1), replicas=1)
    running, other = world.submit(adapter="x", tenant_id="a"), world.submit(tenant_id="c")
    blocked = world.submit(adapter="y", tenant_id="b")
    tokens = {world.dispatch(running): [1], world.dispatch(other): [1]}
    world.frame("replica-0", tokens=tokens)  # so that the other tenant has had more
    further = world.submit(tenant_id="c")
    assert world.order == ([running, other] if waits else [running, other, further])
    world.frame("replica-0", finished={world.dispatch(running): engine.FINISH_REASON_STOP})
    assert blocked in world.order, "its slot is free"


def test_requests_wait_here_and_not_in_the_engine(bench):
    world = bench(replicas=1, sequences=100, step=64)
    for _ in range(50):
        world.submit(prompt=64)
    sent = len(world.sent["replica-0"])
    assert 1 <= sent <= 4  # the window covers about one step of 64 tokens
    assert world.core.cells["cell"].queue.requests == 50 - sent


def test_a_replica_never_gets_more_than_it_holds(bench):
    world = bench(replicas=1, sequences=3, step=4096)
    handles = [world.submit() for _ in range(10)]
    assert world.order == handles[:3]
    dispatch = world.dispatch(handles[0])
    world.frame("replica-0", tokens={dispatch: [1]}, finished={dispatch: STOP})
    assert world.order == handles[:4]


def test_kv_room_is_booked_with_the_expected_output(bench):
    world = bench(replicas=1, blocks=10, step=4096, output_tokens_expected=32)
    world.submit(prompt=48, output=500)  # 48 + 32 tokens: 5 blocks
    world.submit(prompt=48, output=16)  # 4 blocks
    world.submit(prompt=48, output=16)
    assert world.order == [1, 2]
    book = world.core.replicas["replica-0"]
    assert book.kv_booked == 9


def test_a_prompt_that_needs_the_whole_cache_still_goes_alone(bench):
    world = bench(replicas=1, blocks=10, context=1000)
    handle = world.submit(prompt=159, output=500)
    assert world.order == [handle]
    assert world.dispatch(handle).output_max == 500


def test_output_is_cut_to_the_context(bench):
    world = bench(replicas=1, context=100)
    assert world.dispatch(world.submit(prompt=90, output=50)).output_max == 10
    assert world.dispatch(world.submit(prompt=10, output=0)).output_max == 90


def test_the_less_loaded_replica_is_picked(bench):
    world = bench(sequences=100, step=4096)
    long = world.submit(prompt=900)
    assert world.dispatch(world.submit()).replica_id != world.dispatch(long).replica_id
    assert world.dispatch(world.submit()).replica_id != world.dispatch(long).replica_id


def test_higher_tiers_go_first_then_arrival(bench):
    world = bench(replicas=1, sequences=1)
    running = world.submit()
    low, high, higher = (world.submit(priority=p) for p in (0, 5, 9))
    for handle in (running, higher, high, low):
        dispatch = world.dispatch(handle)
        assert world.order[-1] == handle
        world.frame("replica-0", tokens={dispatch: [1]}, finished={dispatch: STOP})


def test_a_flooding_tenant_does_not_starve_another(bench):
    world = bench(replicas=1, sequences=1)
    for _ in range(20):
        world.submit(tenant_id="flood", prompt=50)
    light = world.submit(tenant_id="light", prompt=50)
    for _ in range(3):
        dispatch = world.dispatch(world.order[-1])
        world.frame("replica-0", tokens={dispatch: [1]}, finished={dispatch: STOP})
    assert light in world.order


def test_weights_share_a_tier(bench):
    world = bench(replicas=1, sequences=1, context=4000)
    for _ in range(40):
        world.submit(tenant_id="one", weight=1, prompt=100, tick=False)
        world.submit(tenant_id="three", weight=3, prompt=100, tick=False)
    world.tick()
    for _ in range(39):
        dispatch = world.dispatch(world.order[-1])
        world.frame("replica-0", tokens={dispatch: [1] * 10}, finished={dispatch: STOP})
    heavy = sum(world.core.gateways[1].requests.get(handle) is None for handle in range(2, 81, 2))
    light = sum(world.core.gateways[1].requests.get(handle) is None for handle in range(1, 81, 2))
    assert heavy == pytest.approx(3 * light, abs=2)


def test_idleness_earns_no_credit(bench):
    world = bench(replicas=1, sequences=1, deadline_default_s=1e4)
    world.submit(tenant_id="returning", prompt=50)  # known, and then idle
    for _ in range(30):
        world.submit(tenant_id="steady", prompt=50)
    for _ in range(10):
        dispatch = world.dispatch(world.order[-1])
        world.frame("replica-0", tokens={dispatch: [1]}, finished={dispatch: STOP})
    back = [world.submit(tenant_id="returning", prompt=50) for _ in range(10)]
    for _ in range(8):
        dispatch = world.dispatch(world.order[-1])
        world.frame("replica-0", tokens={dispatch: [1]}, finished={dispatch: STOP})
    assert len([handle for handle in world.order if handle in back]) <= 5


def test_a_full_queue_rejects_with_an_honest_time(bench):
    world = bench(replicas=1, sequences=1, queue_requests_max=2)
    for _ in range(3):
        world.submit()
    outcome = world.outcome(world.submit())
    assert (outcome.kind, outcome.code) == (wire.OUTCOME_KIND_REJECTED, "queue_full")
    assert outcome.retry_after_ms >= 100


def test_a_queue_is_bounded_in_tokens(bench):
    world = bench(replicas=1, sequences=1, queue_tokens_max=100)
    world.submit(prompt=60)
    world.submit(prompt=60)
    assert world.outcome(world.submit(prompt=60)).code == "queue_full"


def test_a_longer_queue_means_a_longer_wait(bench):
    waits = []
    for size in (1, 10):
        world = bench(replicas=1, sequences=1, queue_requests_max=size, deadline_default_s=1e4)
        for _ in range(size + 1):
            world.submit(prompt=200)
        waits.append(world.outcome(world.submit(prompt=200)).retry_after_ms)
    assert waits[1] > 2 * waits[0]


def test_rejections_name_their_reason(bench):
    world = bench()
    assert world.outcome(world.submit(cell_id="elsewhere")).code == "unavailable"
    assert world.outcome(world.submit(prompt=1000)).code == "context_length_exceeded"
    world.core.drain()
    outcome = world.outcome(world.submit())
    assert (outcome.code, outcome.kind) == ("draining", wire.OUTCOME_KIND_REJECTED)
    assert outcome.retry_after_ms > 0


def test_a_prompt_too_long_is_found_out_when_the_first_replica_attaches(bench):
    world = bench(replicas=1)
    world.core.on_replica_lost("replica-0", 1, world.now)
    handle, other = world.submit(prompt=5000), world.submit()
    world.attach("replica-0", 2)
    world.tick()
    assert world.outcome(handle).code == "context_length_exceeded"
    assert world.order == [other]


def test_a_deadline_evicts_requests_without_a_token(bench):
    world = bench(replicas=1, sequences=1)
    runs = world.submit(deadline_s=1.0)
    stuck = world.submit(deadline_s=1.0)
    dispatch = world.dispatch(runs)
    world.frame("replica-0", tokens={dispatch: [1]})
    world.tick(2.0)
    outcome = world.outcome(stuck)
    assert (outcome.kind, outcome.code) == (wire.OUTCOME_KIND_EVICTED, "deadline_exceeded")
    assert outcome.message.startswith("no first token after 2.0 s;")
    assert outcome.retry_after_ms > 0
    assert world.core.live_requests == 1  # the one with a token goes on


def test_a_short_deadline_is_told_in_the_unit_in_which_it_was_set(bench):
    world = bench(replicas=1, sequences=1)
    stuck = world.submit(deadline_s=0.003)
    world.tick(0.004)
    assert world.outcome(stuck).message.startswith("no first token after 4 ms;")


def test_a_deadline_also_ends_a_dispatch_without_a_token(bench):
    world = bench(replicas=1)
    handle = world.submit(deadline_s=1.0)
    world.tick(1.5)
    assert world.outcome(handle).kind == wire.OUTCOME_KIND_EVICTED
    assert world.cancelled["replica-0"] == [world.dispatch(handle).sequence]
    assert len(world.core.replicas["replica-0"].dispatches) == 1  # until the engine says so


def test_without_replicas_the_deadline_says_no_capacity(bench):
    world = bench(replicas=0)
    handle = world.submit()
    world.tick(31.0)
    assert world.outcome(handle).code == "no_capacity"


def test_cancel_is_answered_at_once_and_booked_until_the_engine_ends(bench):
    world = bench(replicas=1, sequences=1)
    handle, waiting = world.submit(), world.submit()
    dispatch = world.dispatch(handle)
    world.frame("replica-0", tokens={dispatch: [1]})
    world.core.cancel(1, handle)
    world.core.cancel(1, handle)  # races are harmless
    world.tick()
    assert world.outcome(handle).kind == wire.OUTCOME_KIND_CANCELLED
    assert world.order == [handle]  # its place is not free yet
    world.frame(
        "replica-0", tokens={dispatch: [2]}, finished={dispatch: engine.FINISH_REASON_CANCELLED}
    )
    assert world.batch().tokens == [1]
    assert world.order == [handle, waiting]


def test_a_gateway_that_leaves_takes_its_requests_along(bench):
    world = bench(replicas=1, sequences=1)
    world.core.on_gateway(2, world.now)
    runs, waits = world.submit(gateway=2), world.submit(gateway=2)
    other = world.submit()
    world.core.on_gateway_gone(2)
    world.tick()
    assert world.cancelled["replica-0"] == [world.dispatch(runs).sequence]
    assert world.core.live_requests == 1
    dispatch = world.dispatch(runs)
    world.frame(
        "replica-0", tokens={dispatch: [9]}, finished={dispatch: engine.FINISH_REASON_CANCELLED}
    )
    assert world.order == [runs, other]
    assert waits not in world.order


def test_a_handle_in_use_is_an_error(bench):
    world = bench()
    world.submit()
    world.handles -= 1
    with pytest.raises(ValueError, match="in use"):
        world.submit()


def test_a_moving_cell_returns_waiting_requests_and_ends_running_ones(bench):
    world = bench(replicas=1, sequences=1)
    runs, waits = world.submit(), world.submit()
    world.plan(cells=())
    world.tick()
    outcome = world.outcome(waits)
    assert (outcome.kind, outcome.code) == (wire.OUTCOME_KIND_EVICTED, "unavailable")
    assert world.outcome(world.submit()).code == "unavailable"
    assert not world.core.is_surplus("replica-0")
    dispatch = world.dispatch(runs)
    world.frame("replica-0", tokens={dispatch: [1]}, finished={dispatch: STOP})
    assert world.outcome(runs).kind == wire.OUTCOME_KIND_STOP
    assert world.core.is_surplus("replica-0")
    world.core.on_replica_lost("replica-0", 1, world.now)
    world.plan(cells=())
    assert not world.core.cells
    assert not world.core.replicas


def test_the_end_ends_everything_once(bench):
    world = bench(replicas=1, sequences=2)
    emitted, silent, waiting = (world.submit() for _ in range(3))
    dispatch = world.dispatch(emitted)
    world.frame("replica-0", tokens={dispatch: [1]})
    world.core.end_all()
    world.tick()
    assert world.outcome(emitted).kind == wire.OUTCOME_KIND_LOST
    assert world.outcome(silent).kind == wire.OUTCOME_KIND_EVICTED
    assert world.outcome(waiting).code == "draining"
    assert world.core.live_requests == 0


def test_cell_states_are_told_when_they_change_and_as_a_sign_of_life(bench):
    world = bench()
    world.tick(0.2)
    before = len(world.batch().cells)
    world.tick(0.2)
    assert len(world.batch().cells) == before
    world.tick(1.0)
    assert len(world.batch().cells) == before + 1
    world.submit()
    world.tick(0.2)
    state = world.batch().cells[-1]
    assert (state.running, state.replicas_ready, state.queued) == (1, 2, 0)


def test_a_report_on_a_cell_waits_briefly_to_ride_with_tokens(bench):
    world = bench()
    world.tick(1.0)  # told, and a sign of life
    world.submit()
    world.tick(0.11)
    told, told_at = len(world.batch().cells), world.now
    world.submit()
    world.tick(0.01)
    assert len(world.batch().cells) == told, "not more often than every 100 ms"
    assert told_at + 0.1 < world.core.next_tick_at(world.now) < told_at + 0.16
    world.tick(0.1)  # as a frame brings it
    assert len(world.batch().cells) == told + 1


@pytest.mark.parametrize("cells", [(), ("cell",)], ids=["without cells", "with idle replicas"])
def test_every_gateway_hears_a_sign_of_life_all_the_time(bench, cells):
    world = bench()
    world.plan(cells=cells)
    heard_at: list[float] = []
    for _ in range(100):
        if cells:
            world.frame("replica-0", tick=False)  # idle hosts say every 0.2 s that they live
        if world.tick(0.1).batches:
            heard_at.append(world.now)
    gaps = [later - earlier for earlier, later in pairwise(heard_at)]
    assert heard_at
    assert max(gaps) < 0.4
    assert min(gaps[1:]) > 0.2, "nothing else is told when nothing changes"


def test_speed_is_learned_from_frames(bench):
    world = bench(replicas=1, sequences=100, step=256)
    book = world.core.replicas["replica-0"]
    for _ in range(60):
        decode = engine.EngineState(running=2, step_us=1000)
        world.frame("replica-0", state=decode)
        full = engine.EngineState(running=2, prefilling=1, step_us=4000, step_prompt_tokens=240)
        world.frame("replica-0", state=full)
    assert book.speed.decode_step_s == pytest.approx(0.001, rel=0.1)
    assert book.speed.token_s == pytest.approx(0.003 / 240, rel=0.1)
    assert book.tokens_s == pytest.approx(254 / 0.0042, rel=0.1)


def test_a_prompt_goes_where_its_blocks_are(bench):
    world = bench(sequences=100, step=256)
    first = world.submit(prompt=200, hashes=range(12))
    home = world.dispatch(first)
    world.frame(home.replica_id, admitted=[home], tokens={home: [1]}, finished={home: STOP})
    for _ in range(3):  # the other one is as idle, and free of what was sent before
        again = world.dispatch(world.submit(prompt=200, hashes=range(12)))
        assert again.replica_id == home.replica_id
        assert again.cached_tokens == 192
        world.frame(home.replica_id, admitted=[again], tokens={again: [1]}, finished={again: STOP})


def test_load_overrides_a_cached_prefix(bench):
    world = bench(sequences=100, step=4096, context=4000, blocks=4096)
    first = world.dispatch(world.submit(prompt=320, hashes=range(20)))
    world.frame(first.replica_id, tokens={first: [1]}, finished={first: STOP})
    for _ in range(20):
        world.submit(prompt=3200, hashes=range(20))
    used = {dispatch.replica_id for dispatches in world.sent.values() for dispatch in dispatches}
    assert used == {"replica-0", "replica-1"}


def test_a_session_stays_where_it_was_while_that_costs_nothing(bench):
    world = bench(replicas=4, sequences=100, step=4096)
    first = world.dispatch(world.submit(session=77))
    world.frame(first.replica_id, tokens={first: [1]}, finished={first: STOP})
    again = world.dispatch(world.submit(session=77))
    assert again.replica_id == first.replica_id


def test_shorter_prompts_of_a_tenant_overtake_but_not_for_ever(bench):
    world = bench(replicas=1, sequences=1, step=4096, overtake_factor=2.0, deadline_default_s=1e3)
    running = world.submit()
    long = world.submit(prompt=900)
    waited = 0
    while long not in world.order and waited < 50:
        world.submit(prompt=20)
        dispatch = world.dispatch(world.order[-1])
        world.now += 0.2
        world.frame("replica-0", tokens={dispatch: [1]}, finished={dispatch: STOP})
        waited += 1
    assert world.order[0] == running
    assert world.order[1] != long, "a shorter one went first"
    objective_s = world.core.gateways[1].requests[long].objective_s
    assert waited * 0.2 <= 2 * objective_s + 0.5


def test_preempted_work_goes_on_behind_its_emitted_tokens(bench):
    world = bench(replicas=1, sequences=1, deadline_default_s=30.0)
    batch = world.submit(is_preemptible=True, output=50)
    dispatch = world.dispatch(batch)
    world.frame("replica-0", admitted=[dispatch], tokens={dispatch: [1, 2, 3]})
    state = engine.EngineState(running=1, step_us=20_000)
    for _ in range(10):
        world.now += 0.02
        world.frame("replica-0", tokens={dispatch: [4]}, state=state)
    urgent = world.submit(priority=9, deadline_s=0.3)
    assert world.cancelled["replica-0"] == [dispatch.sequence]
    world.frame(
        "replica-0", tokens={dispatch: [99]}, finished={dispatch: engine.FINISH_REASON_CANCELLED}
    )
    assert world.order == [batch, urgent]
    fast = world.dispatch(urgent)
    world.frame("replica-0", tokens={fast: [7]}, finished={fast: STOP})
    again = world.dispatch(batch)
    assert again is not dispatch
    assert (again.prompt_tokens, again.output_max) == (10 + 13, 50 - 13)
    world.frame("replica-0", tokens={again: [5]}, finished={again: STOP})
    assert world.outcome(batch).output_tokens == 14
    told = world.batch()
    assert told.tokens == [1, 2, 3, *[4] * 10, 7, 5], "what was cut off is not told"
    assert world.core.take_stats().preemptions == 1
