"""Where a request's answers ran: told when there is more to tell than its event's other fields do."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch import attempts
from gateway.dispatch.attempts import KEPT_MAX, TOLD_MAX, Attempt
from gateway.dispatch.generation import EndKind, GenerationEnd, WholeGeneration
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire
from tests.unit.gateway.test_streamed import SPEC

LOST = GenerationEnd(EndKind.LOST, ErrorCode.REPLICA_LOST, "replica r1 was lost")
STOP = GenerationEnd(EndKind.STOP)


def attempt(number: int, ending: GenerationEnd | None = STOP, **more: Any) -> Attempt:
    it = Attempt(number, "c", "router-1", 10.0 + number, 0)
    it.ended_at_s = 10.5 + number
    if ending is not None:
        it.outcome, it.reason = ending.outcome, ending.message
    for name, value in more.items():
        setattr(it, name, value)
    return it


def told(*answers: list[Attempt]) -> list[Any]:
    return attempts.rows(answers, 9.0, 99.0)


def test_one_plain_attempt_needs_no_words() -> None:
    assert told([]) == []
    assert told([attempt(0)]) == []
    assert told([attempt(0, None)]) == []  # its client has gone: the event says so


def test_a_resumed_answer_tells_both_places_and_why() -> None:
    placed = wire.Placed(replica_id="r1", queue_us=7, engine_queue_us=8, load_us=6, cached_tokens=9)
    first = attempt(0, LOST, placed=placed, first_at_s=10.25, output_tokens=4)
    found = told([first, attempt(1)])
    assert [(it.replica_id, it.outcome, it.reason) for it in found] == [
        ("r1", "replica_lost", "replica r1 was lost"),
        ("", "stop", ""),
    ]
    one = found[0]
    assert (one.submitted_us, one.first_us, one.ended_us) == (1_000_000, 1_250_000, 1_500_000)
    assert (one.queue_us, one.engine_queue_us, one.load_us) == (7, 8, 6)
    assert (one.cached_tokens, one.output_tokens) == (9, 4)


def test_an_open_attempt_ends_with_the_request() -> None:
    [one] = told([attempt(0, LOST, ended_at_s=0.0)])
    assert one.ended_us == 90_000_000


def test_decisions_are_told_with_the_best_candidates_and_the_chosen_one() -> None:
    rows = [wire.Candidate(replica_id=f"r{number}") for number in range(100)]
    known = wire.Explanation(chosen="r70", candidates=rows)
    [one] = told([attempt(0, placed=wire.Placed(decision=known))])
    decision = wire.Explanation.FromString(one.decision)
    assert [it.replica_id for it in decision.candidates] == [*(f"r{n}" for n in range(16)), "r70"]
    assert len(known.candidates) == 100
    [late] = told([attempt(0, decision=wire.Explanation(chosen="r1"))])
    assert wire.Explanation.FromString(late.decision).chosen == "r1"


def test_a_request_that_an_older_router_placed_again_ran_at_two_places() -> None:
    generation = WholeGeneration(SPEC)
    generation.begin_submission("c", "router-1", 10.0)
    generation.place(wire.Placed(replica_id="r1", queue_us=7))
    generation.push([1, 2, 3], 10.1)
    generation.place(wire.Placed(replica_id="r2", queue_us=400_000))
    generation.end(GenerationEnd(EndKind.LENGTH))
    generation.end_submission(12.0)
    one, two = told(generation.attempts)
    assert (one.outcome, one.ended_us, one.output_tokens) == ("requeued", 1_400_000, 3)
    assert (two.replica_id, two.number, two.queue_us) == ("r2", 1, 0)
    assert (two.submitted_us, two.ended_us) == (1_400_000, 3_000_000)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_the_reported_attempts_are_bounded(numbers: list[int]) -> None:
    answers: list[list[Attempt]] = []
    for tries in numbers:
        made: list[Attempt] = []
        for number in range(tries):
            attempts.begun(made, attempt(number, LOST))
        assert len(made) <= KEPT_MAX
        assert {0, tries - 1} <= {it.number for it in made}
        answers.append(made)
    found = told(*answers)
    assert len(found) <= TOLD_MAX
    assert found == sorted(found, key=lambda it: (it.part, it.number))
