"""Tests that windows are complete and aligned, and that a call returns a bounded number."""

from hypothesis import given
from hypothesis import strategies as st

from telemetry.evidence import WINDOWS_MAX, complete_windows

moments = st.integers(0, 4_102_444_800_000)


@given(moments, moments, st.integers(1_000, 3_600_000))
def test_only_whole_windows_inside(after_ms: int, until_ms: int, window_ms: int) -> None:
    starts_ms = complete_windows(after_ms, until_ms, window_ms)
    assert len(starts_ms) <= WINDOWS_MAX
    assert all(start_ms % window_ms == 0 for start_ms in starts_ms)
    if starts_ms:
        assert after_ms <= starts_ms[0] < after_ms + window_ms
        assert starts_ms[-1] + window_ms == starts_ms.stop <= until_ms
        assert starts_ms.stop + window_ms > until_ms or len(starts_ms) == WINDOWS_MAX
    else:
        assert until_ms < after_ms + 2 * window_ms
