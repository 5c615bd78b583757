"""What the order of the queue means when the memory of replicas is full."""

from sluice.wire.engine.v1 import engine_pb2 as engine

STOP = engine.FINISH_REASON_STOP
BLOCK = 16


def state(used: int, running: int) -> engine.EngineState:
    return engine.EngineState(kv_blocks_used=used, running=running)


def test_no_request_takes_the_memory_awaited_by_the_head_of_the_queue(bench):
    world = bench(replicas=2, blocks=20, step=4096, sequences=50, output_tokens_expected=16)
    full = [world.submit(prompt=14 * BLOCK, output=BLOCK) for _ in range(2)]  # 15 of 20 blocks
    head = world.submit(prompt=9 * BLOCK, output=BLOCK, tenant_id="other")
    assert world.order == full, "10 blocks are free nowhere"
    small = [
        world.submit(prompt=BLOCK, output=BLOCK, tenant_id=f"small-{number}") for number in range(5)
    ]
    held = {world.dispatch(handle).replica_id for handle in small[:2]}
    assert len(held) == 1, "the second replica's memory is kept"
    assert world.core.cells["cell"].queue.requests == 4
    first = next(handle for handle in full if world.dispatch(handle).replica_id not in held)
    dispatch = world.dispatch(first)
    world.now += 1.0
    world.frame(
        dispatch.replica_id, tokens={dispatch: [1]}, finished={dispatch: STOP}, state=state(0, 0)
    )
    assert world.dispatch(head).replica_id == dispatch.replica_id


def test_an_answer_longer_than_expected_is_booked_as_it_grows(bench):
    world = bench(replicas=1, blocks=64, step=4096, output_tokens_expected=16)
    dispatch = world.dispatch(world.submit(prompt=BLOCK, output=500))
    book = world.core.replicas["replica-0"]
    assert book.kv_booked == 2
    world.frame("replica-0", tokens={dispatch: [1] * 16}, state=state(2, 1))
    assert book.kv_booked == 2
    world.frame("replica-0", tokens={dispatch: [1] * 48}, state=state(5, 1))
    assert dispatch.output_booked == 80, "a quarter more than it has"
    assert book.kv_booked == 6
    world.frame("replica-0", tokens={dispatch: [1]}, finished={dispatch: STOP}, state=state(0, 0))
    assert book.kv_booked == 0


def test_an_engine_s_own_account_of_its_memory_counts(bench):
    world = bench(replicas=1, blocks=20, step=4096, output_tokens_expected=16)
    dispatch = world.dispatch(world.submit(prompt=BLOCK, output=500))
    world.frame(
        "replica-0", admitted=[dispatch], state=state(17, 1)
    )  # it reserves more than we book
    second = world.submit(prompt=2 * BLOCK, output=BLOCK)
    assert second in world.order, "3 of 20 are free"
    third = world.submit(prompt=BLOCK, output=BLOCK)
    assert third not in world.order, "what was sent since counts too"
    other = world.dispatch(second)
    world.frame("replica-0", admitted=[other], state=state(18, 2))
    assert third in world.order


def test_late_requests_are_sent_to_a_full_replica_in_groups(bench):
    world = bench(replicas=1, blocks=20, step=4096, sequences=50, output_tokens_expected=16)
    running = [world.dispatch(world.submit(prompt=3 * BLOCK, output=BLOCK)) for _ in range(5)]
    late = [world.submit(prompt=3 * BLOCK, output=BLOCK, deadline_s=1000.0) for _ in range(3)]
    world.tick(60.0)  # by now they have missed their objective many times
    used = 20

    def one_ends() -> None:
        nonlocal used
        dispatch = running.pop()
        used -= 4
        world.frame(
            "replica-0",
            tokens={dispatch: [1]},
            finished={dispatch: STOP},
            state=state(used, len(running)),
        )

    one_ends()
    assert late[0] in world.order, "the last group went a minute ago"
    world.tick(0.05)
    one_ends()
    assert late[1] not in world.order
    fresh = world.submit(prompt=BLOCK, output=BLOCK, tenant_id="fresh")
    world.frame("replica-0", tokens={running[0]: [1]}, state=state(used, len(running)))
    assert fresh in world.order, "who can still be in time does not wait"
    world.tick(0.1)
    one_ends()
    assert late[1] not in world.order
    world.tick(1.0)
    assert world.order[-1] == late[1]
