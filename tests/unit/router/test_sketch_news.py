"""Gateways hear of cached prefixes: all at the beginning, then what is new."""

import pytest

from router.core.types.plan import EngineLimits
from router.wire import connect_response
from sluice.prefix_marks import marks_of
from sluice.wire.router.v1 import router_pb2 as wire
from tests.unit.router.conftest import CELL, GATEWAY, Bench

_LIMITS = EngineLimits(100_000, 8, 2048, 4000, 32)
_PROMPT = tuple(range(1000, 1040))


@pytest.fixture
def bench() -> Bench:
    return Bench(limits=_LIMITS, replicas=1)


def _marks(parts: list[wire.CellSketch]) -> list[int]:
    return [mark for part in parts for mark in part.marks]


def test_a_placed_prompt_is_told_once_and_a_later_gateway_hears_all(bench: Bench) -> None:
    bench.submit(prompt=1290, hashes=_PROMPT)
    bench.tick(0.2)
    told = bench.batch().sketches
    assert _marks(told) == marks_of(_PROMPT)
    assert {(part.cell_id, part.generation) for part in told} == {(CELL, 1)}
    assert {part.epoch for part in told} == {bench.core.cells[CELL].epoch}
    bench.submit(prompt=1290, hashes=_PROMPT)
    bench.tick(0.2)
    assert _marks(bench.batch().sketches) == marks_of(_PROMPT)
    bench.core.on_gateway(2, bench.now)
    bench.tick(0.0)
    assert _marks(bench.batch(2).sketches) == marks_of(_PROMPT)
    message = connect_response(bench.batch(2))
    assert _marks(list(message.sketches)) == marks_of(_PROMPT)


def test_prompts_with_a_session_and_of_lone_cells_are_not_told(bench: Bench) -> None:
    bench.submit(prompt=1290, hashes=_PROMPT, session=7)
    bench.core.on_siblings(())
    bench.submit(prompt=1290, hashes=_PROMPT)
    bench.tick(0.2)
    bench.core.on_siblings((CELL,))
    assert not bench.batch(GATEWAY).sketches
    bench.submit(prompt=1290, hashes=_PROMPT)
    bench.tick(0.2)
    assert bench.batch(GATEWAY).sketches


def test_a_replica_that_goes_takes_its_blocks_along(bench: Bench) -> None:
    bench.submit(prompt=1290, hashes=_PROMPT)
    for number in range(4):
        bench.core.on_replica_lost("replica-0", 1 + number, bench.now)
        bench.attach("replica-0", 2 + number)
        fresh = tuple(range(2000 + 100 * number, 2030 + 100 * number))
        bench.submit(prompt=970, hashes=fresh)
        bench.tick(0.2)
    bench.core.on_gateway(2, bench.now)
    bench.tick(0.0)
    assert not set(marks_of(_PROMPT)) & set(_marks(bench.batch(2).sketches))
