"""What follows from what a tenant has used, and from when to when it counts."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from control_plane.budgets.feed import ASKED_MAX, Ledger
from control_plane.budgets.model import (
    Budget,
    BudgetBody,
    BudgetSpan,
    BudgetStanding,
    OnExhausted,
    Period,
    State,
    Unit,
    Usage,
    span_at,
    stops,
)
from control_plane.budgets.repository import Due
from control_plane.budgets.service import BudgetPace, readings

SUMS = st.integers(0, 2**40)
USAGE = st.builds(Usage, SUMS, SUMS, SUMS, SUMS)
BUDGET = st.builds(
    Budget,
    st.sampled_from(Unit),
    st.integers(1, 2**41),
    st.sampled_from(Period),
    st.integers(0, 100),
    st.lists(st.integers(1, 99), max_size=4, unique=True).map(lambda it: tuple(sorted(it))),
)
ORDER = [State.OK, State.SOFT, State.EXHAUSTED]


@given(BUDGET, USAGE)
def test_a_budget_is_exhausted_from_its_amount_on_and_never_below(
    budget: Budget, usage: Usage
) -> None:
    used = budget.used(usage)
    assert (budget.state(usage) is State.EXHAUSTED) == (used >= budget.amount)
    assert used <= max(usage.requests, usage.prompt_tokens + usage.output_tokens)
    reached = budget.reached_percent(usage)
    assert all((it <= reached) == (used >= it * budget.amount / 100) for it in budget.soft_percents)
    if budget.state(usage) is State.SOFT:
        assert reached > 0


@given(BUDGET, USAGE, USAGE)
def test_more_usage_never_goes_back_and_less_opens_again(
    budget: Budget, usage: Usage, more: Usage
) -> None:
    before, after = budget.state(usage), budget.state(usage + more)
    if usage.cached_tokens <= usage.prompt_tokens and more.cached_tokens <= more.prompt_tokens:
        assert ORDER.index(before) <= ORDER.index(after)
        assert budget.reached_percent(usage) <= budget.reached_percent(usage + more)
    # A correction: the state is that of what the ledger says now, whatever it was.
    assert budget.state(Usage()) is State.OK


@given(BUDGET, USAGE, st.integers(0, 2**41))
def test_a_larger_amount_never_stops_an_unstopped_tenant(
    budget: Budget, usage: Usage, more: int
) -> None:
    larger = Budget(
        budget.unit,
        budget.amount + more,
        budget.period,
        budget.cached_percent,
        budget.soft_percents,
    )
    assert ORDER.index(larger.state(usage)) <= ORDER.index(budget.state(usage))


@pytest.mark.parametrize(
    ("percent", "used"), [(100, 150), (50, 110), (0, 70), (33, 96)], ids=lambda it: str(it)
)
def test_cached_prompt_tokens_count_by_their_percent(percent: int, used: int) -> None:
    usage = Usage(requests=3, prompt_tokens=100, cached_tokens=80, output_tokens=50)
    assert Budget(Unit.TOKENS, 1, Period.DAY, percent, ()).used(usage) == used
    assert Budget(Unit.REQUESTS, 1, Period.DAY, percent, ()).used(usage) == 3


@given(st.sampled_from(Period), st.integers(0, 4_102_444_799_999))
def test_periods_follow_one_another_without_a_gap(period: Period, now_ms: int) -> None:
    span = span_at(period, now_ms)
    assert span.start_ms <= now_ms < span.end_ms
    assert span_at(period, span.end_ms).start_ms == span.end_ms
    assert span_at(period, span.start_ms) == span_at(period, span.end_ms - 1) == span
    start = datetime.fromtimestamp(span.start_ms / 1000, UTC)
    assert (start.hour, start.minute, start.second) == (0, 0, 0)
    assert period is Period.DAY or start.day == 1


@given(
    st.lists(
        st.builds(
            BudgetStanding,
            st.text(max_size=3),
            st.sampled_from(["", "m"]),
            BUDGET,
            st.sampled_from(OnExhausted),
            st.sampled_from(State),
            st.builds(BudgetSpan, st.just(0), st.integers(1, 10)),
        ),
        max_size=5,
    ),
    st.integers(0, 10),
)
def test_a_tenant_is_stopped_that_used_up_a_hard_budget_in_this_period(
    known: list[BudgetStanding], now_ms: int
) -> None:
    told = stops(known, now_ms)
    expected = [
        it.span.end_ms
        for it in sorted(known, key=lambda it: it.name)
        if it.state is State.EXHAUSTED and it.on_exhausted == "stop" and it.span.end_ms > now_ms
    ]
    assert [stop["ends_at_unix_ms"] for stop in told] == expected


def test_a_budget_of_a_model_counts_that_model_alone() -> None:
    one, two = Usage(1, 10, 0, 5), Usage(2, 20, 0, 7)
    ledger = Ledger({("t", "m"): one, ("t", "n"): two, ("u", "m"): two}, 9)
    due = [
        Due(str(number), tenant, model_id, Period.DAY)
        for number, (tenant, model_id) in enumerate((("t", "m"), ("t", ""), ("t", "x"), ("v", "")))
    ]
    found = readings(due, BudgetSpan(0, 1), ledger, 8)
    assert [it.usage for it in found] == [one, Usage(3, 30, 0, 12), Usage(), Usage()]
    assert {(it.looked_at_ms, it.ingested_until_ms) for it in found} == {(8, 9)}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"amount": 0},
        {"amount": 2**53 + 1},
        {"amount": "5"},
        {"amount": 1, "unit": "euros"},
        {"amount": 1, "period": "week"},
        {"amount": 1, "cached_percent": 101},
        {"amount": 1, "soft_percents": [100]},
        {"amount": 1, "soft_percents": [0]},
        {"amount": 1, "model_id": "a b"},
        {"amount": 1, "on_exhausted": "drop"},
        {"amount": 1, "tenant_id": "t"},
    ],
)
def test_invalid_budget_bodies_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        BudgetBody.model_validate(body)


def test_a_budget_has_documented_defaults() -> None:
    body = BudgetBody.model_validate({"amount": 1, "soft_percents": [90, 50, 90]})
    assert body.soft_percents == [50, 90]
    assert (body.unit, body.period, body.on_exhausted) == ("tokens", "month", "stop")
    assert BudgetBody(amount=1, soft_percents=[]).soft_percents == []


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 20)), max_size=40))
def test_sums_run_for_at_most_a_fifth_of_the_time(steps: list[tuple[bool, float]]) -> None:
    pace, now_s, busy_s = BudgetPace(), 0.0, 0.0
    for is_answered, took_s in steps:
        now_s += took_s
        busy_s += took_s
        before = pace.asked_max
        (pace.answered if is_answered else pace.failed)(now_s, took_s)
        assert 1 <= pace.asked_max <= ASKED_MAX
        assert is_answered or pace.asked_max == max(1, before // 2)
        assert is_answered or pace.rests_until_s >= now_s + 1
        now_s = pace.rests_until_s
    assert busy_s <= now_s / 5 + 1e-6
