"""Tests that gaps in offsets are counted, and that repeated messages are not."""

from hypothesis import given
from hypothesis import strategies as st

from telemetry.offsets import OffsetTracker
from telemetry.rows import BrokerMessage


def messages(*offsets: int, partition: int = 0) -> list[BrokerMessage]:
    return [BrokerMessage("t", partition, offset, b"") for offset in offsets]


def test_a_jump_counts_the_skipped_offsets() -> None:
    tracker = OffsetTracker()
    tracker.assign({0: 5, 1: -1001})
    assert tracker.missing(messages(5, 6, 10)) == 3
    assert tracker.missing(messages(7, 11)) == 0  # these messages were read again
    # no offset was committed, so the first message shows no gap
    assert tracker.missing(messages(700, 701, partition=1)) == 0
    tracker.assign({0: 0})
    assert tracker.missing(messages(4)) == 4


@given(st.integers(0, 50), st.sets(st.integers(0, 50)))
def test_delivered_and_missing_make_the_whole(committed: int, offsets: set[int]) -> None:
    tracker = OffsetTracker()
    tracker.assign({0: committed})
    later = sorted(offset for offset in offsets if offset >= committed)
    missing = sum(tracker.missing(messages(offset)) for offset in later)
    assert missing + len(later) == (later[-1] + 1 - committed if later else 0)
