"""The progress of a batch, and its slowest group; shared with the judging thread."""

from collections.abc import Callable

from control_plane.quality.verdicts import Group


class Progress:
    """Watches the judging of one batch.

    A thread cannot be stopped from outside: it asks before each group whether it may go on.
    Remaining groups are for the next batch.
    """

    def __init__(self, clock: Callable[[], float], span_s: float) -> None:
        """Take the clock (monotonic seconds), and the time after which no group is begun."""
        self._clock = clock
        self._span_s = span_s
        self._until_s: float | None = None
        self._is_over = False
        self._now: tuple[Group, float] | None = None  # being judged, since when
        self._slowest: tuple[Group | None, float] = None, 0.0

    def begins(self, group: Group) -> bool:
        """Note the begin of a group; return whether it may begin: the first one always may."""
        now_s = self._clock()
        self._close(now_s)
        if self._until_s is None:
            self._until_s = now_s + self._span_s
        elif now_s >= self._until_s:
            return False
        if self._is_over:
            return False
        self._now = group, now_s
        return True

    def ended(self) -> None:
        """Note that all groups were judged or skipped."""
        self._close(self._clock())

    def stop(self) -> None:
        """Let no other group begin: the result is not needed any more."""
        self._is_over = True

    def slowest(self, at_least_s: float) -> Group | None:
        """Return the slowest group; None if none took long."""
        self._close(self._clock())
        group, took_s = self._slowest
        return group if took_s >= at_least_s else None

    def _close(self, now_s: float) -> None:
        if self._now is not None:
            group, since_s = self._now
            self._slowest = max(self._slowest, (group, now_s - since_s), key=lambda one: one[1])
            self._now = None
