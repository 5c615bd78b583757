"""Which replica of an embedding pool gets a text, whatever happened to the ones before."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.embedding.standing import (
    FAILURES_MAX,
    PAUSE_FIRST_S,
    PAUSE_MAX_S,
    EmbedderStanding,
    EmbedOutcome,
    choose,
)


def run_one(standing: EmbedderStanding, outcome: EmbedOutcome, at_s: float) -> None:
    standing.begin(at_s)
    standing.end(outcome, at_s, at_s)


def test_the_least_busy_one_is_chosen_and_of_equals_the_one_that_waited_longest() -> None:
    one, two, three = (EmbedderStanding(name) for name in "123")
    taken = []
    for step in range(6):
        chosen = choose([one, two, three])
        chosen.begin(step)
        taken.append(chosen.replica_id)
    assert taken == ["1", "2", "3"] * 2
    two.end(EmbedOutcome.ANSWERED, 1.0, 7.0)
    assert choose([one, two, three]) is two
    assert choose([one, two, three], tried=["2"]) is one
    assert choose([two], tried=["2"]) is None


def test_an_unreachable_one_is_ejected_though_it_looks_idle() -> None:
    dead, busy = EmbedderStanding("dead"), EmbedderStanding("busy", in_flight=50)
    run_one(dead, EmbedOutcome.UNREACHABLE, 10.0)
    assert choose([dead, busy]) is busy
    assert choose([dead]) is None


def test_failures_of_the_engine_eject_only_in_a_row() -> None:
    standing = EmbedderStanding("a")
    for _ in range(FAILURES_MAX - 1):
        run_one(standing, EmbedOutcome.FAILED, 1.0)
    run_one(standing, EmbedOutcome.ANSWERED, 1.0)
    for _ in range(FAILURES_MAX - 1):
        run_one(standing, EmbedOutcome.FAILED, 1.0)
    assert standing.is_trusted
    run_one(standing, EmbedOutcome.FAILED, 1.0)
    assert not standing.is_trusted


def test_all_that_it_held_when_it_died_is_one_strike() -> None:
    standing = EmbedderStanding("a")
    for _ in range(64):
        standing.begin(1.0)
    for _ in range(64):
        standing.end(EmbedOutcome.UNREACHABLE, 1.0, 2.0)
    assert (standing.strikes, standing.in_flight) == (1, 0)


def test_a_late_answer_to_a_text_of_before_does_not_forgive() -> None:
    standing = EmbedderStanding("a")
    standing.begin(1.0)
    standing.begin(1.0)
    standing.end(EmbedOutcome.UNREACHABLE, 1.0, 2.0)
    standing.end(EmbedOutcome.ANSWERED, 1.0, 3.0)
    assert not standing.is_trusted
    standing.begin(1.0)
    standing.forgive()
    standing.end(EmbedOutcome.UNREACHABLE, 1.0, 4.0)  # it was sent to the process that has ended
    assert standing.is_trusted


def test_one_probe_at_a_time_decides() -> None:
    standing = EmbedderStanding("a")
    assert not standing.starts_probe(5.0)
    run_one(standing, EmbedOutcome.UNREACHABLE, 5.0)
    assert not standing.starts_probe(5.0 + PAUSE_FIRST_S / 2)
    assert standing.starts_probe(5.0 + PAUSE_FIRST_S)
    assert not standing.starts_probe(50.0)
    standing.end_probe(EmbedOutcome.UNREACHABLE, 50.0)
    assert not standing.starts_probe(50.0 + PAUSE_FIRST_S)
    assert standing.starts_probe(50.0 + 2 * PAUSE_FIRST_S)
    standing.end_probe(EmbedOutcome.ANSWERED, 51.0)
    assert choose([standing]) is standing


def test_a_probe_that_fails_after_its_replica_was_trusted_again_says_nothing() -> None:
    standing = EmbedderStanding("a")
    run_one(standing, EmbedOutcome.UNREACHABLE, 0.0)
    assert standing.starts_probe(PAUSE_FIRST_S)
    standing.forgive()
    standing.end_probe(EmbedOutcome.UNREACHABLE, 1.0)
    assert standing.is_trusted


def test_probes_become_rarer_but_never_end() -> None:
    standing, waits = EmbedderStanding("a"), []
    run_one(standing, EmbedOutcome.UNREACHABLE, 0.0)
    for _ in range(2000):
        low, high = standing.ejected_at_s, standing.ejected_at_s + PAUSE_MAX_S
        assert not standing.starts_probe(low)
        assert standing.starts_probe(high)
        standing.end_probe(EmbedOutcome.UNREACHABLE, high)
        waits.append(high - low)
    assert set(waits) == {PAUSE_MAX_S}


_EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([*EmbedOutcome, None]), st.floats(0, 3)),
    max_size=80,
)


@given(_EVENTS)
def test_counts_stay_true_and_everybody_returns(events) -> None:
    standings = [EmbedderStanding(str(number)) for number in range(3)]
    begun: list[list[float]] = [[], [], []]
    now_s = 0.0
    for number, outcome, pause_s in events:
        now_s += pause_s
        standing = standings[number]
        if outcome is None:
            chosen = choose(standings)
            if chosen is not None:
                assert chosen.is_trusted
                chosen.begin(now_s)
                begun[int(chosen.replica_id)].append(now_s)
        elif begun[number]:
            standing.end(outcome, begun[number].pop(), now_s)
        elif standing.starts_probe(now_s):
            standing.end_probe(outcome, now_s)
        assert [s.in_flight for s in standings] == [len(b) for b in begun]
    for standing in standings:
        assert standing.is_trusted or standing.starts_probe(now_s + PAUSE_MAX_S)
