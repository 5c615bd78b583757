"""How long a request goes on trying, how often it asks meanwhile, and after which endings."""

import pytest

from gateway.dispatch.generation import EndKind, Generation, GenerationEnd
from gateway.dispatch.patience import Patience
from sluice.errors import ErrorCode
from tests.unit.gateway.test_dispatcher import LOST, made_by

FULL = GenerationEnd(EndKind.REFUSED, ErrorCode.QUEUE_FULL, "4096 requests wait")
MOVED = GenerationEnd(EndKind.REFUSED, ErrorCode.DRAINING, "this router is shutting down")


def begun(generation: Generation) -> Generation:
    generation.begin_attempt()
    generation.push([40], 1.0)
    return generation


def asked_at(patience: Patience, ending: GenerationEnd) -> list[float]:
    """Return when it asks again, if it is refused at once each time."""
    times = [0.0]
    while patience.refusal(ending, times[-1]) is None:
        times.append(times[-1] + patience.pause_s)
        patience.begin_attempt(times[-1])
    return times[1:]


@pytest.mark.parametrize(
    ("deadline_ms", "wait_s"),
    [(0, 30.0), (45_000, 45.0), (2_000, 10.0), (600_000, 60.0)],
    ids=str,
)
def test_a_begun_answer_waits_for_the_only_replica_as_long_as_a_new_one(
    deadline_ms: int, wait_s: float
) -> None:
    generation = made_by(deadline_ms=deadline_ms)
    patience = Patience(generation, 0.0)
    generation.begin_attempt()
    generation.push([40], 1.0)
    restarting = GenerationEnd(EndKind.REFUSED, ErrorCode.NO_CAPACITY, "no replica was ready")

    assert patience.refusal(LOST, 100.0) is None
    assert patience.acquire_by_s == patience.give_up_at_s == 100.0 + wait_s
    assert patience.refusal(restarting, 100.0 + wait_s - 1.0) is None
    refused = patience.refusal(restarting, 100.0 + wait_s)
    assert refused is not None
    assert refused.code is ErrorCode.REPLICA_LOST


@pytest.mark.parametrize(
    ("deadline_ms", "admission_ms", "wait_s"),
    [(0, 1_500, 30.0), (0, 600_000, 600.0), (2_000, 600_000, 2.0)],
    ids=str,
)
def test_a_tier_that_lets_in_less_does_not_give_up_earlier(
    deadline_ms: int, admission_ms: int, wait_s: float
) -> None:
    generation = made_by(deadline_ms=deadline_ms, admission_ms=admission_ms)
    assert Patience(generation, 0.0).give_up_at_s == wait_s


def test_a_request_without_a_token_at_its_deadline_gets_a_deadline_error() -> None:
    patience = Patience(made_by(deadline_ms=500), 0.0)
    frozen = GenerationEnd(EndKind.LOST, ErrorCode.UNAVAILABLE, "the router is gone")
    assert patience.refusal(frozen, 0.1) is None
    refused = patience.refusal(frozen, 0.9)
    assert refused is not None
    assert refused.code is ErrorCode.DEADLINE_EXCEEDED


def test_a_refused_request_asks_less_and_less_often() -> None:
    patience = Patience(begun(made_by()), 0.0)
    pauses = []
    for ending in (LOST, FULL, FULL, FULL, FULL, FULL, LOST, FULL):
        assert patience.refusal(ending, 1.0) is None
        pauses.append(patience.pause_s / pauses[0] if pauses else patience.pause_s)
    assert pauses[1:] == pytest.approx([1, 2, 4, 8, 10, 1, 1])


@pytest.mark.parametrize("request_id", ["a", "b", "c"])
def test_a_begun_answer_asks_until_its_time_is_up(request_id: str) -> None:
    patience = Patience(begun(made_by(request_id=request_id)), 0.0)
    assert patience.refusal(LOST, 0.0) is None
    times = asked_at(patience, FULL)
    assert 29.85 <= times[-1] < 30.0
    assert len(times) <= 70


def test_a_new_request_without_a_taker_asks_a_few_times() -> None:
    patience = Patience(made_by(), 0.0)
    patience.begin_attempt(0.0)
    times = asked_at(patience, MOVED)
    assert 1.85 <= times[-1] < 2.0, "as long as a reconnection may take"
    assert len(times) <= 8


@pytest.mark.parametrize(
    ("deadline_ms", "wait_s"), [(1_000, 10.0), (0, 30.0), (600_000, 60.0)], ids=str
)
@pytest.mark.parametrize("ending", [FULL, MOVED], ids=["full", "moved"])
def test_a_further_answer_waits_as_one_that_has_begun(
    deadline_ms: int, wait_s: float, ending: GenerationEnd
) -> None:
    patience = Patience(made_by(is_begun=True, deadline_ms=deadline_ms), 0.0)
    assert patience.give_up_at_s == wait_s
    patience.begin_attempt(0.0)
    assert wait_s - 0.15 <= asked_at(patience, ending)[-1] < wait_s


def test_a_further_answer_that_is_lost_again_and_again_ends() -> None:
    patience = Patience(made_by(is_begun=True), 0.0)
    patience.begin_attempt(0.0)
    assert asked_at(patience, LOST)[-1] < 30.0


def test_requests_lost_together_retry_at_different_times() -> None:
    pauses = set()
    for number in range(100):
        patience = Patience(begun(made_by(request_id=f"req_{number}")), 0.0)
        assert patience.refusal(LOST, 0.0) is None
        assert 0.05 <= patience.pause_s <= 0.1
        pauses.add(patience.pause_s)
    assert len(pauses) > 50


def test_a_request_that_was_shown_signs_of_life_waits_for_replicas_until_its_deadline() -> None:
    generation = made_by(deadline_ms=5_000, absence_ms=3_000)
    patience = Patience(generation, 0.0)
    patience.begin_attempt(0.0)
    away = GenerationEnd(EndKind.REFUSED, ErrorCode.NO_CAPACITY, "no replica was ready")
    assert patience.refusal(away, 3.0) is away, "another model may stand in"
    generation.nudge()
    assert patience.refusal(away, 3.0) is None
    assert generation.submit_message(1, "cell", 2_000).absence_ms == 0
    assert patience.refusal(away, 5.0) is away
