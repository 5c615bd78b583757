"""What may be tried again: one loss of everything, not one after the other; no tenant's for all."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.retry_budget import AGAIN, ALWAYS, PERIOD_S, RetryBudget


def budget_of(open_requests: dict[str, int]) -> RetryBudget:
    budget = RetryBudget()
    for tenant, count in open_requests.items():
        for _ in range(count):
            budget.opened(tenant)
    return budget


def taken(budget: RetryBudget, tenant: str, now_s: float, wanted: int = 5000) -> int:
    return sum(budget.take(tenant, now_s) for _ in range(wanted))


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 300), min_size=2), st.integers(1, 9)
)
def test_every_open_request_has_a_retry_after_any_losses(
    open_requests: dict[str, int], storms: int
) -> None:
    budget = budget_of(open_requests)
    victim, *others = open_requests
    for tenant in others:
        for _ in range(storms):  # new requests, whose predecessors were lost for good
            taken(budget, tenant, 5.0)
            budget.closed(tenant)
            budget.opened(tenant)
    wanted = AGAIN * open_requests[victim]
    assert taken(budget, victim, 5.0, wanted) == wanted


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=100), st.integers(1, 20))
def test_a_storm_is_bounded(gaps: list[float], open_requests: int) -> None:
    budget, now_s, count = budget_of({"a": open_requests, "b": 1}), 0.0, 0
    for gap in gaps:
        now_s += gap
        count += taken(budget, "a", now_s, 20) + taken(budget, "b", now_s, 20)
    size = ALWAYS + AGAIN * (open_requests + 1)
    assert count <= size * (1 + now_s / PERIOD_S)
    assert budget.refused == 40 * len(gaps) - count


def test_no_tenant_takes_more_of_the_shared_part_than_it_leaves() -> None:
    budget = budget_of({"a": 1, "b": 1, "c": 1})
    assert [taken(budget, tenant, 0.0) for tenant in "abc"] == [
        AGAIN + ALWAYS // 2,
        AGAIN + ALWAYS // 4,
        AGAIN + ALWAYS // 8,
    ]


def test_time_gives_it_back() -> None:
    budget = budget_of({"a": 3})
    for period in range(3):
        for now_s in (period * PERIOD_S, (period + 0.9) * PERIOD_S):
            left = 3 * AGAIN + ALWAYS // 2 if now_s == period * PERIOD_S else 0
            assert taken(budget, "a", now_s) == left


def test_a_tenant_without_open_requests_gets_no_new_share_before_its_time() -> None:
    budget = budget_of({"a": 1, "b": 1})
    assert taken(budget, "a", 0.0) == AGAIN + ALWAYS // 2
    budget.closed("a")
    budget.opened("a")
    assert taken(budget, "a", PERIOD_S / 2) == 0
    assert taken(budget, "a", PERIOD_S) == AGAIN + ALWAYS // 2


def test_nothing_is_kept_of_tenants_that_are_gone() -> None:
    budget = RetryBudget()
    for number in range(100):
        budget.opened(f"t{number}")
        assert budget.take(f"t{number}", 1.0)
    for number in range(100):
        budget.closed(f"t{number}")
    assert budget.tenants == 100, "or a new request would begin a new share"
    for number in range(100):
        budget.opened(f"u{number}")
        budget.closed(f"u{number}")
    budget.opened("last")
    assert budget.take("last", 1.0 + PERIOD_S)
    assert budget.tenants == 1
