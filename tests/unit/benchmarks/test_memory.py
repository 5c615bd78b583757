from benchmarks.load.memory import slope_mb_per_min


def test_the_slope_is_that_of_the_last_half_of_samples() -> None:
    grown_first = [(10.0 * n, 100.0 + min(n, 6) * 50) for n in range(12)]
    assert slope_mb_per_min(grown_first) == 0.0
    grown_later = [(10.0 * n, 100.0 + max(n - 6, 0) * 2) for n in range(12)]
    assert slope_mb_per_min(grown_later) == 12.0
