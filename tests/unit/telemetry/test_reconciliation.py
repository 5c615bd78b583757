"""Tests the comparison of ledger and engines: equal, different, and unknown."""

from hypothesis import given
from hypothesis import strategies as st

from telemetry.reconciliation import (
    OTHER,
    Compared,
    ReconciliationState,
    compared,
    difference,
    mismatch_tokens,
)

HOUR_MS = 3_600_000


def one(ledger: int, engines: int, uncertain: int = 0, **how: object) -> Compared:
    [found] = compared(
        [{"hour_ms": HOUR_MS, "model": "m", "ledger": ledger}],
        [
            {
                "hour_ms": HOUR_MS,
                "model": "m",
                "engines": engines,
                "uncertain": uncertain,
                "discarded": 7,
            }
        ],
        how.get("killed", ()),  # type: ignore[arg-type]
        how.get("closed_ms", 2 * HOUR_MS),  # type: ignore[arg-type]
    )
    return found


def test_an_hour_is_equal_or_says_by_how_much_it_is_not() -> None:
    assert one(100, 100).state is ReconciliationState.EQUAL
    missing, twice = one(90, 100), one(110, 100)
    assert (missing.state, missing.difference) == (ReconciliationState.DIFFERS, -10)
    assert (twice.state, twice.difference) == (ReconciliationState.DIFFERS, 10)
    assert mismatch_tokens([missing, twice, one(100, 100)]) == 20
    assert twice.as_json() == {
        "start": "1970-01-01T01:00:00Z",
        "model": "m",
        "ledger_tokens": 110,
        "engine_tokens": 100,
        "uncertain_tokens": 0,
        "discarded_tokens": 7,
        "ledger_prompt_tokens": 0,
        "engine_prompt_tokens": 0,
        "uncertain_prompt_tokens": 0,
        "resumed_prompt_tokens": 0,
        "has_prompts": False,
        "state": "differs",
        "difference_tokens": 10,
        "prompt_difference_tokens": 0,
    }


def test_prompts_are_compared_where_all_routers_count_them() -> None:
    def state(
        ledger: int, engines: int, *, has_prompts: bool = True
    ) -> tuple[ReconciliationState, int]:
        name = {"hour_ms": HOUR_MS, "model": "m"}
        [found] = compared(
            [name | {"ledger": 5, "ledger_prompt": ledger}],
            [
                name
                | {"engines": 5, "engines_prompt": engines, "uncertain_prompt": 10}
                | {"resumed_prompt": 999, "has_prompts": has_prompts}
            ],
            [],
            2 * HOUR_MS,
        )
        return found.state, mismatch_tokens([found])

    assert [state(it, 100) for it in (99, 100, 110, 113)] == [
        (ReconciliationState.DIFFERS, 1),
        (ReconciliationState.EQUAL, 0),
        (ReconciliationState.EQUAL, 0),
        (ReconciliationState.DIFFERS, 3),
    ]
    assert state(7, 100, has_prompts=False) == (ReconciliationState.EQUAL, 0)


def test_tokens_of_cut_requests_may_be_in_the_ledger_or_not() -> None:
    assert [one(it, 100, 20).difference for it in (99, 100, 110, 120, 121)] == [-1, 0, 0, 0, 1]


def test_nothing_is_said_before_its_time_or_without_the_counts_of_a_router() -> None:
    early, killed = one(1, 100, closed_ms=2 * HOUR_MS - 1), one(1, 100, killed=[HOUR_MS])
    assert (early.state, killed.state) == (ReconciliationState.OPEN, ReconciliationState.UNKNOWN)
    assert mismatch_tokens([early, killed]) == 0


def test_hours_with_tokens_of_unnamed_models_differ_only_as_far_as_is_known() -> None:
    ledger = [
        {"hour_ms": hour, "model": name, "ledger": 5} for hour in (0, HOUR_MS) for name in "ab"
    ]
    engines = [(0, "a", 5), (0, OTHER, 0), (HOUR_MS, "a", 5), (HOUR_MS, "b", 4)]
    counted = [
        {"hour_ms": hour, "model": name, "engines": tokens, "uncertain": 0, "discarded": 0}
        for hour, name, tokens in engines
    ]
    found = compared(ledger, counted, [], 2 * HOUR_MS)
    assert [(it.start_ms, it.model, it.state) for it in found] == [
        (0, OTHER, ReconciliationState.UNKNOWN),
        (0, "a", ReconciliationState.EQUAL),
        (0, "b", ReconciliationState.UNKNOWN),
        (HOUR_MS, "a", ReconciliationState.EQUAL),
        (HOUR_MS, "b", ReconciliationState.DIFFERS),
    ]


def test_a_request_of_one_side_alone_is_found() -> None:
    ledger = [{"hour_ms": 0, "model": "a", "ledger": 5}]
    counted = [{"hour_ms": 0, "model": "b", "engines": 6, "uncertain": 0, "discarded": 0}]
    found = compared(ledger, counted, [], HOUR_MS)
    assert [(it.model, it.difference) for it in found] == [("a", 5), ("b", -6)]


@given(*[st.integers(0, 1_000)] * 3)
def test_the_difference_is_the_distance_to_the_span(ledger: int, low: int, more: int) -> None:
    span = range(low, low + more + 1)
    nearest = min(span, key=lambda it: abs(it - ledger))
    assert difference(ledger, low, more) == ledger - nearest
