"""What is judged together, and what is left alone for a while."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.quality.deferrals import PARKED_S, Deferrals
from control_plane.quality.judging import within
from control_plane.quality.repository import Claimed

ONE, OTHER = ("p", "one"), ("p", "other")


@given(
    groups=st.lists(st.tuples(st.sampled_from("pq"), st.integers(0, 30)), max_size=200),
    sizes=st.dictionaries(st.sampled_from("pq"), st.integers(0, 90)),
    rows_max=st.integers(1, 100),
)
def test_a_batch_is_bounded_and_never_empty(groups, sizes, rows_max) -> None:
    claimed = [Claimed(n, (pool, str(asking))) for n, (pool, asking) in enumerate(groups)]
    taken = within(claimed, sizes, rows_max)
    assert bool(taken) == bool(claimed)
    assert len(taken) == 1 or sum(sizes.get(pool, 0) for pool, _ in taken) <= rows_max
    firsts = list(dict.fromkeys(one.group for one in claimed))
    assert list(taken) == firsts[: len(taken)], "those that wait longest"


def test_a_failing_judgement_is_retried_ever_later_and_then_parked() -> None:
    known, now_s, pauses = Deferrals(), 1000.0, []
    for _ in range(8):
        is_news = known.failed(ONE, now_s)
        begin_s = now_s
        while ONE in known.waiting(now_s):
            now_s += 1.0
        pauses.append(now_s - begin_s)
        assert is_news == (len(pauses) == 6), "told once"
    assert pauses == [5, 10, 20, 40, 80, PARKED_S, PARKED_S, PARKED_S]
    assert known.parked == 1
    known.failed(OTHER, now_s)
    assert known.waiting(now_s) == [OTHER]
    known.succeeded([ONE, OTHER, ("p", "third")])
    assert (known.parked, known.waiting(now_s)) == (0, [])


def test_the_memory_of_judging_is_bounded() -> None:
    known = Deferrals()
    for number in range(5000):
        known.failed(("p", str(number)), 0.0)
    assert 0 < len(known.waiting(0.0)) <= 1024
    known.forget(10 * PARKED_S)
    assert known.waiting(0.0) == []
