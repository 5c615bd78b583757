"""A breaker for each tool: one that fails again and again is left alone for a while. Pure."""

from collections.abc import Hashable

_FAILURES_MAX = 5  # in a row
_OPEN_S = 15.0
_TOOLS_MAX = 4096


class _Record:
    __slots__ = ("failures", "open_until_s")

    def __init__(self) -> None:
        self.failures, self.open_until_s = 0, 0.0


class ToolBreakers:
    """The breakers of one worker.

    Five failures in a row open a breaker for 15 s. Then one call tries; its success closes it.
    Neither a tool's own error nor a call that ran out of the loop's budget is a failure.
    """

    def __init__(self) -> None:
        """Begin: all are closed."""
        self._records: dict[Hashable, _Record] = {}

    def refused_for_s(self, tool: Hashable, now_s: float) -> float:
        """Return how long no call of a tool is made; 0: this one is, and its end is to be told."""
        record = self._records.get(tool)
        if record is None or record.failures < _FAILURES_MAX:
            return 0.0
        if now_s < record.open_until_s:
            return record.open_until_s - now_s
        record.open_until_s = now_s + _OPEN_S  # the one that tries
        return 0.0

    def note(self, tool: Hashable, now_s: float, *, has_failed: bool) -> None:
        """A call has ended."""
        if not has_failed:
            self._records.pop(tool, None)
            return
        if tool not in self._records and len(self._records) >= _TOOLS_MAX:
            del self._records[next(iter(self._records))]
        record = self._records.setdefault(tool, _Record())
        record.failures += 1
        record.open_until_s = now_s + _OPEN_S
