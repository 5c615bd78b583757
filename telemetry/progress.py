"""Computes the time up to which all events of gateways are in ClickHouse. Pure.

A caller records the end offsets of the topic's partitions from time to time. Once all messages up
to these offsets are written, every message that the broker had at the time of the record is in
ClickHouse. An event reaches the broker at most `HELD_MAX_MS` after the end of its request. So the
events of all requests that ended this long before the record are in ClickHouse.
"""

from collections import deque
from collections.abc import Mapping

# Longest time between the end of a request and the arrival of its event at the broker, in
# milliseconds. The producer's thread and batching take 0.1 s, and a slow broker takes longer. If a
# gateway spools events to disk, they arrive later, which this service cannot detect.
HELD_MAX_MS = 3_000
_MARKS_MAX = 600


class IngestProgress:
    """The time up to which all events are ingested, from the offsets of the consumer group.

    Attributes:
        until_ms: Unix time. All events that were emitted before are written. 0 means unknown. The
            time never decreases.
    """

    def __init__(self) -> None:
        self.until_ms = 0
        self._marks: deque[tuple[int, Mapping[int, int]]] = deque()

    def mark(self, now_ms: int, ends: Mapping[int, int]) -> None:
        """Record the end offset of each partition at a time.

        If 600 earlier records are not written yet, a new one is ignored. Then `until_ms` only
        advances in larger steps.
        """
        if len(self._marks) < _MARKS_MAX:
            self._marks.append((now_ms, dict(ends)))

    def written(self, offsets: Mapping[int, int]) -> None:
        """Record the offset after the last written message of each partition.

        A negative offset means that the partition was never read. An empty partition then still
        counts as completely written.
        """
        while self._marks:
            now_ms, ends = self._marks[0]
            if any(max(0, offsets.get(where, 0)) < end for where, end in ends.items()):
                return
            self._marks.popleft()
            self.until_ms = max(self.until_ms, now_ms - HELD_MAX_MS)

    def forget(self) -> None:
        """Delete all records, because their offsets belong to another cluster."""
        self._marks.clear()
