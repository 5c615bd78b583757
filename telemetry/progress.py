"""Computes the time up to which all events of gateways are in ClickHouse. Pure.

A caller records the end offsets of the topic's partitions from time to time. Once all messages up
to these offsets are written, every message that the broker had at that time is in ClickHouse.
Events reach the broker at most `HELD_MAX_MS` after the end of their request. So the events of all
requests that ended at least this long before that time are in ClickHouse, too.
"""

from collections import deque
from collections.abc import Mapping

# Longest time between the end of a request and the arrival of its event at the broker, in
# milliseconds. The producer's thread and batching need 0.1 s, and a slow broker more. Events that a
# gateway spooled to disk arrive later, and this service cannot detect them.
HELD_MAX_MS = 3_000
_MARKS_MAX = 600


class IngestProgress:
    """The time up to which all events are ingested, from the offsets of the consumer group.

    Attributes:
        until_ms: Unix time before which all emitted events are written, or 0 if unknown. It never
            decreases.
    """

    def __init__(self) -> None:
        self.until_ms = 0
        self._marks: deque[tuple[int, Mapping[int, int]]] = deque()

    def mark(self, now_ms: int, ends: Mapping[int, int]) -> None:
        """Record, at a time, the offset after the last message of each partition.

        While 600 earlier records wait, new ones are ignored, so progress advances in larger steps.
        """
        if len(self._marks) < _MARKS_MAX:
            self._marks.append((now_ms, dict(ends)))

    def written(self, offsets: Mapping[int, int]) -> None:
        """Record the offset after the last written message of each partition.

        A negative offset means that the partition was never read, which suffices if it is empty.
        """
        while self._marks:
            now_ms, ends = self._marks[0]
            if any(max(0, offsets.get(where, 0)) < end for where, end in ends.items()):
                return
            self._marks.popleft()
            self.until_ms = max(self.until_ms, now_ms - HELD_MAX_MS)

    def forget(self) -> None:
        """Delete all records, because they belong to another cluster."""
        self._marks.clear()
