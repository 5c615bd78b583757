"""The progress of judging one batch and its slowest group, shared with the judging thread."""

from collections.abc import Callable

from control_plane.quality.verdicts import Group


class Progress:
    """Tracks the judging of one batch.

    A thread cannot be stopped from outside, so it calls `begins` before each group. Groups that may
    not begin wait for the next batch.
    """

    def __init__(self, clock: Callable[[], float], span_s: float) -> None:
        """Create the tracker.

        `span_s` seconds after the first group, by the monotonic `clock`, no further group may
        begin.
        """
        self._clock = clock
        self._span_s = span_s
        self._until_s: float | None = None
        self._is_over = False
        self._now: tuple[Group, float] | None = None  # the group in progress, with its start
        self._slowest: tuple[Group | None, float] = None, 0.0

    def begins(self, group: Group) -> bool:
        """Record the start of a group, and return whether the group may begin.

        The first group always may begin.
        """
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
        """Record that all groups were judged or skipped."""
        self._close(self._clock())

    def stop(self) -> None:
        """Refuse further groups, because their result is no longer needed."""
        self._is_over = True

    def slowest(self, at_least_s: float) -> Group | None:
        """Return the slowest group, or None if every group was faster than `at_least_s`."""
        self._close(self._clock())
        group, took_s = self._slowest
        return group if took_s >= at_least_s else None

    def _close(self, now_s: float) -> None:
        if self._now is not None:
            group, since_s = self._now
            self._slowest = max(self._slowest, (group, now_s - since_s), key=lambda one: one[1])
            self._now = None
