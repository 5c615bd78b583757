"""Which replica of an embedding pool gets a text, whatever happened to the ones before."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.embedding.standing import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    FAILURES_MAX,
    Outcome,
    Standing,
    back_in_s,
    choose,
)


def run_one(standing: Standing, outcome: Outcome, at_s: float) -> None:
    standing.begin(at_s)
    standing.end(outcome, at_s, at_s)


def test_the_least_busy_one_is_chosen_and_of_equals_the_one_that_waited_longest() -> None:
    one, two, three = (Standing(name) for name in "123")
    taken = []
    for step in range(6):
        chosen = choose([one, two, three], step)
        chosen.begin(step)
        taken.append(chosen.replica_id)
    assert taken == ["1", "2", "3"] * 2
    two.end(Outcome.ANSWERED, 1.0, 7.0)
    assert choose([one, two, three], 8.0) is two
    assert choose([one, two, three], 8.0, tried=["2"]) is one
    assert choose([two], 8.0, tried=["2"]) is None


def test_an_unreachable_one_is_ejected_though_it_looks_idle() -> None:
    dead, busy = Standing("dead"), Standing("busy", in_flight=50)
    run_one(dead, Outcome.UNREACHABLE, 10.0)
    assert choose([dead, busy], 10.1) is busy
    assert choose([dead], 10.1) is None
    assert back_in_s([dead], 10.1) == BACKOFF_FIRST_S


def test_failures_of_the_engine_eject_only_in_a_row() -> None:
    standing = Standing("a")
    for _ in range(FAILURES_MAX - 1):
        run_one(standing, Outcome.FAILED, 1.0)
    run_one(standing, Outcome.ANSWERED, 1.0)
    for _ in range(FAILURES_MAX - 1):
        run_one(standing, Outcome.FAILED, 1.0)
    assert standing.may_take(1.0)
    run_one(standing, Outcome.FAILED, 1.0)
    assert not standing.may_take(1.0)


def test_all_that_it_held_when_it_died_is_one_strike() -> None:
    standing = Standing("a")
    for _ in range(64):
        standing.begin(1.0)
    for _ in range(64):
        standing.end(Outcome.UNREACHABLE, 1.0, 2.0)
    assert (standing.strikes, standing.in_flight) == (1, 0)
    assert standing.may_take(2.0 + BACKOFF_FIRST_S)


def test_one_text_is_the_trial_and_its_answer_forgives() -> None:
    standing = Standing("a")
    run_one(standing, Outcome.UNREACHABLE, 0.0)
    standing.begin(BACKOFF_FIRST_S)
    assert not standing.may_take(5.0)
    standing.end(Outcome.UNKNOWN, BACKOFF_FIRST_S, 5.0)  # its client left
    assert standing.may_take(5.0)
    standing.begin(5.0)
    standing.end(Outcome.ANSWERED, 5.0, 5.1)
    standing.begin(5.2)
    assert standing.may_take(5.2)
    assert standing.strikes == 0


def test_trials_become_rarer_but_never_end() -> None:
    standing, now_s, waits = Standing("a"), 0.0, []
    for _ in range(2000):
        run_one(standing, Outcome.UNREACHABLE, now_s)
        waits.append(standing.again_at_s - now_s)
        now_s = standing.again_at_s
    assert waits[:3] == [BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
    assert waits[-1] == BACKOFF_MAX_S


_EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([*Outcome, None]), st.floats(0, 3)), max_size=80
)


@given(_EVENTS)
def test_counts_stay_true_and_everybody_returns(events) -> None:
    standings = [Standing(str(number)) for number in range(3)]
    begun: list[list[float]] = [[], [], []]
    now_s = 0.0
    for number, outcome, pause_s in events:
        now_s += pause_s
        standing = standings[number]
        if outcome is None:
            chosen = choose(standings, now_s)
            if chosen is not None:
                assert chosen.may_take(now_s)
                chosen.begin(now_s)
                begun[int(chosen.replica_id)].append(now_s)
        elif begun[number]:
            standing.end(outcome, begun[number].pop(), now_s)
        assert [s.in_flight for s in standings] == [len(b) for b in begun]
    for number, standing in enumerate(standings):
        while begun[number]:
            standing.end(Outcome.UNKNOWN, begun[number].pop(), now_s)
        assert standing.may_take(now_s + BACKOFF_MAX_S)
