"""Tests the judged quality by release, and that only significant drops are reported."""

import random

import pytest

from telemetry.judged_quality import compared


def row(release: str, good: float, judged: int, *, is_recent: bool, model: str = "m") -> dict:
    return {
        "model": model,
        "release": release,
        "is_recent": is_recent,
        "good": good,
        "judged": judged,
    }


def test_a_release_is_compared_with_all_answers_of_its_model_before() -> None:
    rows = [
        row("r1", 500, 600, is_recent=False),
        row("r0", 300, 400, is_recent=False),
        row("r1", 240, 300, is_recent=True),
        row("r2", 90, 150, is_recent=True),
        row("r9", 10, 900, is_recent=False, model="other"),
    ]
    same, worse = compared(rows)
    assert (same.release, same.judged, same.good, same.drop) == ("r1", 300, 0.8, 0.0)
    assert (worse.release, worse.good) == ("r2", 0.6)
    assert worse.drop == pytest.approx(0.2)


@pytest.mark.parametrize(("before", "now"), [(10, 900), (900, 10), (0, 900)])
def test_too_few_judgements_tell_no_drop(before: int, now: int) -> None:
    [found] = compared(
        [row("r", before, before, is_recent=False), row("r", 0, now, is_recent=True)]
    )
    assert found.drop == 0.0


def test_answers_that_are_as_good_as_before_seldom_seem_worse() -> None:
    chance, alarms = random.Random(1), 0
    for _ in range(1_000):
        good = [sum(chance.random() < 0.8 for _ in range(size)) for size in (400, 100)]
        rows = [row("r", good[0], 400, is_recent=False), row("r", good[1], 100, is_recent=True)]
        alarms += compared(rows)[0].drop > 0
    assert alarms < 45  # 2.5 % false alarms are expected


def test_a_drop_by_ten_points_is_mostly_found_in_four_hundred_answers() -> None:
    chance, found = random.Random(2), 0
    for _ in range(200):
        good = [sum(chance.random() < share for _ in range(size)) for share, size in DROP]
        rows = [row("r", good[0], 1_000, is_recent=False), row("r", good[1], 400, is_recent=True)]
        found += compared(rows)[0].drop > 0.05
    assert found > 180


DROP = ((0.8, 1_000), (0.7, 400))
