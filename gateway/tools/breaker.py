"""A circuit breaker for each tool, which refuses calls for a time after repeated failures. Pure."""

from collections.abc import Hashable

_FAILURES_MAX = 5  # consecutive failures that open a breaker
_OPEN_S = 15.0
_TOOLS_MAX = 4096


class _Record:
    __slots__ = ("failures", "open_until_s")

    def __init__(self) -> None:
        self.failures, self.open_until_s = 0, 0.0


class ToolBreakers:
    """The circuit breakers of one worker.

    Five consecutive failures open a breaker for 15 s. Then a single call may run, and its success
    closes the breaker. An error that the tool itself reports is not a failure. A call that exceeded
    the loop's time budget is not a failure either.
    """

    def __init__(self) -> None:
        """All breakers are closed at the start."""
        self._records: dict[Hashable, _Record] = {}

    def refused_for_s(self, tool: Hashable, now_s: float) -> float:
        """Return for how many seconds calls are refused, or 0 if this call may run.

        If the call may run, the caller has to report the call's end to `note`.
        """
        record = self._records.get(tool)
        if record is None or record.failures < _FAILURES_MAX:
            return 0.0
        if now_s < record.open_until_s:
            return record.open_until_s - now_s
        # only this call may run until its end is reported or the pause is over
        record.open_until_s = now_s + _OPEN_S
        return 0.0

    def note(self, tool: Hashable, now_s: float, *, has_failed: bool) -> None:
        """Record the end of a call."""
        if not has_failed:
            self._records.pop(tool, None)
            return
        if tool not in self._records and len(self._records) >= _TOOLS_MAX:
            del self._records[next(iter(self._records))]
        record = self._records.setdefault(tool, _Record())
        record.failures += 1
        record.open_until_s = now_s + _OPEN_S
