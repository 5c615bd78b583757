"""Tests that ingestion progress never includes a message that is not written yet."""

from hypothesis import given
from hypothesis import strategies as st

from telemetry.progress import HELD_MAX_MS, IngestProgress

NOW_MS = 1_790_000_000_000


def test_nothing_is_known_before_a_mark_is_reached() -> None:
    progress = IngestProgress()
    progress.written({0: 100})
    assert progress.until_ms == 0
    progress.mark(NOW_MS, {0: 5, 1: 3})
    progress.written({0: 100})  # no offset of partition 1 was ever committed
    assert progress.until_ms == 0
    progress.written({0: 5, 1: 3})
    assert progress.until_ms == NOW_MS - HELD_MAX_MS


def test_empty_partitions_are_written() -> None:
    progress = IngestProgress()
    progress.mark(NOW_MS, {0: 0, 1: 0})
    progress.written({0: -1001, 1: -1001})
    assert progress.until_ms == NOW_MS - HELD_MAX_MS


def test_another_cluster_begins_anew_and_written_progress_stays() -> None:
    progress = IngestProgress()
    progress.mark(NOW_MS, {0: 5})
    progress.written({0: 5})
    progress.mark(NOW_MS + 1, {0: 9})
    progress.forget()
    progress.written({0: 9})
    assert progress.until_ms == NOW_MS - HELD_MAX_MS


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans()), min_size=1, max_size=900
    )
)
def test_it_follows_the_slowest_partition(moves: list[tuple[int, int, bool]]) -> None:
    """Messages, reads and marks come in any order, and there are more marks than are stored."""
    progress = IngestProgress()
    ends = dict.fromkeys(range(3), 0)
    written = dict.fromkeys(range(3), 0)
    # Messages by the time at which the broker had them, to compute the expected progress.
    sent: list[tuple[int, int, int]] = []
    for step, (partition, count, is_read) in enumerate(moves):
        now_ms = NOW_MS + step
        if is_read:
            written[partition] = min(ends[partition], written[partition] + count)
            progress.written(written)
        else:
            sent += [(now_ms, partition, ends[partition] + number) for number in range(count)]
            ends[partition] += count
        progress.mark(now_ms + 1, ends)
        until_ms = progress.until_ms + HELD_MAX_MS
        assert all(offset < written[where] for at_ms, where, offset in sent if at_ms < until_ms)
    progress.written(ends)
    progress.mark(NOW_MS + 10_000, ends)
    progress.written(ends)
    assert progress.until_ms == NOW_MS + 10_000 - HELD_MAX_MS
