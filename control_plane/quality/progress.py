"""How far a batch has come, and which of its groups takes too long; shared with its thread."""

from collections.abc import Callable

from control_plane.quality.verdicts import Group


class Progress:
    """Watches the judging of one batch.

    A thread cannot be stopped: it asks before each group whether it may go on. Groups that it does
    not come to are for the next batch.
    """

    def __init__(self, clock: Callable[[], float], span_s: float) -> None:
        """Take the clock (monotonic seconds), and after how long no other group is begun."""
        self._clock = clock
        self._span_s = span_s
        self._until_s: float | None = None
        self._is_over = False
        self._now: tuple[Group, float] | None = None  # being judged, since when
        self._slowest: tuple[Group | None, float] = None, 0.0

    def begins(self, group: Group) -> bool:
        """Note that a group is to be judged; return whether it may be: the first one always."""
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
        """Note that all groups were judged, or left."""
        self._close(self._clock())

    def stop(self) -> None:
        """Let no other group be begun: nobody waits for the result any more."""
        self._is_over = True

    def slowest(self, at_least_s: float) -> Group | None:
        """Return the group that has taken the longest, None if that is not so long."""
        self._close(self._clock())
        group, took_s = self._slowest
        return group if took_s >= at_least_s else None

    def _close(self, now_s: float) -> None:
        if self._now is not None:
            group, since_s = self._now
            self._slowest = max(self._slowest, (group, now_s - since_s), key=lambda one: one[1])
            self._now = None
