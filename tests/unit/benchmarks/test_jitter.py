from benchmarks.load.jitter import added, delays_s

STEPS = [1.0, 1.02, 1.04, 1.07, 1.09]


def test_a_token_belongs_to_the_step_that_its_neighbours_leave_for_it() -> None:
    arrivals = [1.041, 1.045, 1.071]  # two came together with the third step
    assert [round(it, 6) for it in delays_s(arrivals, STEPS)] == [0.021, 0.005, 0.001]


def test_an_answer_of_another_time_is_left_out() -> None:
    assert delays_s([0.5, 0.6], STEPS) == []
    assert delays_s([], STEPS) == []


def test_waits_of_the_engine_are_not_counted_as_added() -> None:
    figures = added([[step + 0.003 for step in STEPS]], STEPS)
    assert figures["delay_ms"]["p50"] == 3.0
    assert figures["added_gap_ms"]["p99"] == 0.0
    assert figures["step_gap_ms"]["p99"] == 30.0
