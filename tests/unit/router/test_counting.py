"""What engines gave is summed by hour and model, and nothing is told wrongly when there is much."""

from router.counting import HOUR_MS, KEYS_MAX, MODELS_MAX, OTHER, TokenCounts
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent, TokenCount
from telemetry import reconciliation

NOW_MS = 1000 * HOUR_MS


def reported(counts: TokenCounts) -> dict[tuple[int, str], TokenCount]:
    events = [RequestEvent.FromString(data) for data in counts.reports(NOW_MS + 5)]
    return {(it.received_at_unix_ms, it.model): it.count for it in events if it.model}


def test_models_beyond_the_bound_are_one_that_is_not_compared() -> None:
    counts = TokenCounts("router", 1)
    for number in range(MODELS_MAX + 500):
        counts.add((NOW_MS, f"model-{number}"), 10)
    counts.add((NOW_MS, "model-0"), 5)
    found = reported(counts)
    assert len(found) == MODELS_MAX + 1
    assert found[NOW_MS, "model-0"].output_tokens == 15
    assert found[NOW_MS, OTHER].output_tokens == 5000
    assert OTHER == reconciliation.OTHER


def test_old_hours_are_dropped_whole_and_do_not_come_back() -> None:
    counts = TokenCounts("router", 1)
    assert not reported(counts)  # says what hour it is
    hours = [NOW_MS - back * HOUR_MS for back in range(4, -1, -1)]
    for hour in hours:
        for number in range(MODELS_MAX):
            counts.add((hour, f"model-{number}"), 10)
        reported(counts)
    for hour in hours:
        counts.add((hour, "model-7"), 5)
    found = reported(counts)
    kept = hours[-(KEYS_MAX // MODELS_MAX) :]
    assert len(kept) >= 2
    for hour in hours:
        if hour in kept:
            assert found[hour, "model-7"].output_tokens == 15
        else:
            assert (hour, "model-7") not in found
            assert found[hour, OTHER].output_tokens == 5


def test_this_hour_and_the_one_before_stay_under_any_gateway_clock() -> None:
    counts = TokenCounts("router", 1)
    reported(counts)
    counts.add((NOW_MS, "now"), 10)
    counts.add((NOW_MS - HOUR_MS, "before"), 10)
    for ahead in range(1, 4):
        for number in range(MODELS_MAX):
            counts.add((NOW_MS + ahead * HOUR_MS, f"model-{number}"), 1)
    counts.add((NOW_MS, "now"), 1)
    counts.add((NOW_MS - HOUR_MS, "before"), 1)
    found = reported(counts)
    assert found[NOW_MS, "now"].output_tokens == 11
    assert found[NOW_MS - HOUR_MS, "before"].output_tokens == 11


def test_a_change_during_a_report_is_in_it_or_in_the_next() -> None:
    counts = TokenCounts("router", 1)
    counts.add((NOW_MS, "a"), 10)
    counts.add((NOW_MS, "b"), 10)
    report = counts.reports(NOW_MS)
    first = RequestEvent.FromString(next(report))
    counts.add((NOW_MS, "a"), 1)
    rest = [RequestEvent.FromString(data) for data in report]
    assert (first.model, first.count.output_tokens) == ("a", 10)
    assert [it.model for it in rest] == ["b", ""]
    again = reported(counts)
    assert again[NOW_MS, "a"].output_tokens == 11
    assert again[NOW_MS, "a"].number > first.count.number
