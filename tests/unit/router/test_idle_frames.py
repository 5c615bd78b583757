"""Heartbeats of an idle engine cause no tick, and everything else does."""

from sluice.wire.engine.v1 import engine_pb2 as engine

NAME = "replica-0"


def heard(world, *, steps: int = 0, sequences=(), **state: int) -> bool:
    """Deliver a frame, and return whether it has news."""
    frame = engine.StepFrame(steps=steps, state=engine.EngineState(**state))
    frame.sequence.extend(sequences)
    frame.count.extend(1 for _ in sequences)
    frame.token.extend(7 for _ in sequences)
    return world.core.on_frame(NAME, 1, frame, world.now)


def test_the_heartbeats_of_an_idle_engine_have_no_news(bench) -> None:
    world = bench()
    assert heard(world, kv_blocks_used=3), "the first report is news"
    assert not heard(world, kv_blocks_used=3)
    assert not heard(world, kv_blocks_used=3)
    assert heard(world, kv_blocks_used=4)


def test_the_steps_of_a_probe_are_recorded_but_cause_no_tick(bench) -> None:
    world = bench()
    heard(world)
    assert not heard(world, steps=1, step_us=5000)
    assert not heard(world, steps=2, step_us=5000)
    assert world.core.replicas[NAME].pauses == 3


def test_a_frame_of_a_working_engine_is_news(bench) -> None:
    world = bench(replicas=1)
    heard(world)
    assert heard(world, running=1), "another router's sequence runs"
    assert heard(world), "it has ended"
    assert not heard(world)
    dispatch = world.dispatch(world.submit())
    assert heard(world, steps=1, sequences=(dispatch.sequence,), running=1)


def test_events_of_an_idle_engine_are_news(bench) -> None:
    world = bench()
    heard(world)
    frame = engine.StepFrame(kv_events=engine.KvEvents(number=1, reset=True))
    assert world.core.on_frame(NAME, 1, frame, world.now)
    frame = engine.StepFrame(state=engine.EngineState(adapters_changed=True))
    assert world.core.on_frame(NAME, 1, frame, world.now)


def test_an_idle_engine_accepts_requests_after_a_resume(bench) -> None:
    world = bench(replicas=1)
    heard(world)
    world.core.on_broken(NAME, 1)
    world.core.on_resumed(NAME, 1, 2, [], world.now)
    frame = engine.StepFrame()
    assert world.core.on_frame(NAME, 2, frame, world.now)
    assert world.dispatch(world.submit()).replica_id == NAME
