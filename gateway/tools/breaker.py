"""A circuit breaker for each tool: one that fails repeatedly is not called for a while. Pure."""

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
    Neither an error that the tool reports nor a call that ran out of the loop's budget counts as a
    failure.
    """

    def __init__(self) -> None:
        """Begin with all breakers closed."""
        self._records: dict[Hashable, _Record] = {}

    def refused_for_s(self, tool: Hashable, now_s: float) -> float:
        """Return for how many seconds calls are refused; 0: this call may run.

        `note` must follow a call that runs.
        """
        record = self._records.get(tool)
        if record is None or record.failures < _FAILURES_MAX:
            return 0.0
        if now_s < record.open_until_s:
            return record.open_until_s - now_s
        record.open_until_s = now_s + _OPEN_S  # the one that tries
        return 0.0

    def note(self, tool: Hashable, now_s: float, *, has_failed: bool) -> None:
        """Note the end of a call."""
        if not has_failed:
            self._records.pop(tool, None)
            return
        if tool not in self._records and len(self._records) >= _TOOLS_MAX:
            del self._records[next(iter(self._records))]
        record = self._records.setdefault(tool, _Record())
        record.failures += 1
        record.open_until_s = now_s + _OPEN_S
