"""What may be tried again: one loss of everything, not one after the other."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.retry_budget import ALWAYS, PERIOD_S, RetryBudget


@given(st.integers(0, 2000))
def test_every_open_request_may_be_tried_again_at_once(open_requests: int) -> None:
    budget = RetryBudget()
    assert all(budget.take(open_requests, 5.0) for _ in range(open_requests))


@given(st.lists(st.floats(0, 0.05), min_size=1, max_size=400), st.integers(0, 20))
def test_a_storm_is_bounded(gaps: list[float], open_requests: int) -> None:
    budget, now, taken = RetryBudget(), 0.0, 0
    for gap in gaps:
        now += gap
        taken += sum(budget.take(open_requests, now) for _ in range(20))
    size = ALWAYS + open_requests
    assert taken <= size + now * size / PERIOD_S + 1
    assert budget.refused == 20 * len(gaps) - taken


def test_time_gives_it_back() -> None:
    budget = RetryBudget()
    assert sum(budget.take(0, 0.0) for _ in range(1000)) == ALWAYS
    assert sum(budget.take(0, PERIOD_S / 2) for _ in range(1000)) == ALWAYS // 2
