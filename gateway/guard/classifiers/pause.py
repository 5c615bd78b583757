"""The pause before a failing classifier is asked again, which doubles. Pure."""

_FAILURES_MAX = 3  # in a row
_FIRST_S, _LONGEST_S = 0.5, 30.0
_DOUBLINGS_MAX = 10


class FailurePause:
    """The outcomes of the last questions."""

    def __init__(self) -> None:
        """Begin without failures."""
        self._failures = 0
        self._until_s = 0.0

    def is_asked(self, now_s: float) -> bool:
        """Return whether the classifier may be asked now."""
        return now_s >= self._until_s

    def note(self, now_s: float, *, has_failed: bool) -> None:
        """Note the outcome of a call. After a pause a single failure begins the next pause."""
        if not has_failed:
            self._failures, self._until_s = 0, 0.0
            return
        self._failures += 1
        more = self._failures - _FAILURES_MAX
        if more >= 0:
            self._until_s = now_s + min(_LONGEST_S, _FIRST_S * 2.0 ** min(more, _DOUBLINGS_MAX))
