"""The pause of a failing classifier, which doubles after each further failure. Pure."""

_FAILURES_MAX = 3  # consecutive failures that start a pause
_FIRST_S, _LONGEST_S = 0.5, 30.0
_DOUBLINGS_MAX = 10


class FailurePause:
    """Decides from the latest outcomes of requests whether a classifier is paused."""

    def __init__(self) -> None:
        self._failures = 0
        self._until_s = 0.0

    def is_asked(self, now_s: float) -> bool:
        """Return whether texts may be sent to the classifier now."""
        return now_s >= self._until_s

    def note(self, now_s: float, *, has_failed: bool) -> None:
        """Record the outcome of a request. After a pause, one failure starts the next pause."""
        if not has_failed:
            self._failures, self._until_s = 0, 0.0
            return
        self._failures += 1
        more = self._failures - _FAILURES_MAX
        if more >= 0:
            self._until_s = now_s + min(_LONGEST_S, _FIRST_S * 2.0 ** min(more, _DOUBLINGS_MAX))
