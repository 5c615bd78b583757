"""How long an upload is worked on."""

from datetime import timedelta
from itertools import pairwise

from control_plane.artifacts.model import ATTEMPTS_MAX, pause_after


def test_attempts_become_rare_and_end_within_half_an_hour() -> None:
    pauses = [pause_after(attempt) for attempt in range(1, ATTEMPTS_MAX + 1)]
    assert pauses[0] == timedelta(seconds=2)
    assert all(shorter <= longer for shorter, longer in pairwise(pauses))
    assert timedelta(minutes=15) < sum(pauses, timedelta()) < timedelta(minutes=30)
    assert pause_after(10_000) == pauses[-1]
