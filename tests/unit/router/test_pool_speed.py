"""The speed of a cell's replicas at full batches, where replicas may have separate roles."""

import pytest

from router.core.fleet.pool_speed import median_speed
from router.core.fleet.replica import ReplicaBook
from router.core.fleet.speed import Speed
from router.core.types.plan import EngineLimits, ReplicaRole
from router.core.types.work import EngineSpeed
from sluice.wire.engine.v1 import engine_pb2 as engine

_LIMITS = EngineLimits(4096, 64, 1000, 4096, 16)


def _book(role: ReplicaRole, prefill_us: int = 0, decode_us: int = 0) -> ReplicaBook:
    book = ReplicaBook(role.name, "cell", 0.05)
    book.limits, book.role, book.speed = _LIMITS, role, Speed(1000)
    for count in range(100):
        if decode_us:
            running = 8 + count % 8
            book.speed.observe(engine.EngineState(step_us=decode_us, running=running), 0.0)
        if prefill_us:
            state = engine.EngineState(step_us=prefill_us, step_prompt_tokens=1000)
            book.speed.observe(state, 0.0)
    return book


def _speed(*books: ReplicaBook) -> EngineSpeed | None:
    return median_speed(books, sequence_tokens=100.0, tpot_s=0.05)


def test_prompts_have_the_speed_of_the_replicas_that_prefill() -> None:
    decode = _book(ReplicaRole.DECODE, prefill_us=900_000, decode_us=20_000)
    prefill = _book(ReplicaRole.PREFILL, prefill_us=100_000)
    alone, both = _speed(decode), _speed(decode, prefill)
    assert alone is not None
    assert both is not None
    assert 0.85e-3 < alone.prompt_token_s < 0.95e-3
    assert 0.09e-3 < both.prompt_token_s < 0.11e-3
    assert both.output_token_s == alone.output_token_s


@pytest.mark.parametrize("role", [ReplicaRole.BOTH, ReplicaRole.PREFILL])
def test_the_first_steps_of_a_new_replica_teach_nothing(role: ReplicaRole) -> None:
    """ai-dynamo/dynamo#12430: kernels are compiled in them, so they take far longer."""
    told: list[float] = []
    decode = _book(ReplicaRole.DECODE, decode_us=20_000)
    new = _book(role, decode_us=20_000)
    for step_us in [5_000_000] * 3 + [100_000] * 5:
        state = engine.EngineState(step_us=step_us, step_prompt_tokens=1000)
        new.speed.observe(state, 0.0)
        found = _speed(decode, new) if role is ReplicaRole.PREFILL else _speed(new)
        assert found is not None
        told.append(found.prompt_token_s)
    assert max(told) < 0.15e-3, told


def test_a_prefill_replica_tells_nothing_of_answers() -> None:
    assert _speed(_book(ReplicaRole.PREFILL, prefill_us=100_000, decode_us=20_000)) is None
