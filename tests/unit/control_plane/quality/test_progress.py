"""Which groups of a batch are begun, and which one took the longest."""

from control_plane.quality.progress import Progress

ONE, OTHER, THIRD = ("p", "one"), ("p", "other"), ("p", "third")


def test_no_group_is_begun_after_its_time_but_the_first_is() -> None:
    now_s = 5.0
    progress = Progress(lambda: now_s, 1.0)
    now_s = 50.0
    assert progress.begins(ONE)
    now_s += 0.9
    assert progress.begins(OTHER)
    now_s += 0.2
    assert not progress.begins(THIRD)
    assert progress.slowest(0.5) == ONE
    assert progress.slowest(1.0) is None


def test_a_group_that_is_being_judged_counts_until_now() -> None:
    now_s = 0.0
    progress = Progress(lambda: now_s, 10.0)
    assert progress.slowest(0.0) is None
    assert progress.begins(ONE)
    now_s = 1.0
    assert progress.begins(OTHER)
    now_s = 4.0
    assert progress.slowest(2.0) == OTHER


def test_after_the_end_nothing_begins_and_no_time_counts() -> None:
    now_s = 0.0
    progress = Progress(lambda: now_s, 10.0)
    assert progress.begins(ONE)
    now_s = 1.0
    progress.ended()
    now_s = 9.0
    assert progress.slowest(2.0) is None
    progress.stop()
    assert not progress.begins(OTHER)
