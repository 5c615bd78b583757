"""The time up to which all events of gateways are in ClickHouse; pure.

A caller notes from time to time how far each partition of the topic reaches. Once all of that is
written, every message that was at the broker by then is in ClickHouse, and with it all events of
requests that had ended a little earlier.
"""

from collections import deque
from collections.abc import Mapping

# How long an event may be on its way from the end of its request to the broker: the producer's
# thread and its batches take 0.1 s, a broker that stutters more. Events that gateways spooled to
# disk
# come later, and this service cannot know of them.
HELD_MAX_MS = 3_000
_MARKS_MAX = 600


class IngestProgress:
    """The time up to which all events are ingested, by the offsets of the whole consumer group.

    Attributes:
        until_ms: Unix time before which all emitted events are written; 0: unknown. Never
            decreases.
    """

    def __init__(self) -> None:
        self.until_ms = 0
        self._marks: deque[tuple[int, Mapping[int, int]]] = deque()

    def mark(self, now_ms: int, ends: Mapping[int, int]) -> None:
        """Note the ends of partitions at a time: the offset after the last message.

        While hundreds of marks wait, further ones are left out: progress then advances in larger
        steps.
        """
        if len(self._marks) < _MARKS_MAX:
            self._marks.append((now_ms, dict(ends)))

    def written(self, offsets: Mapping[int, int]) -> None:
        """Note what is written: the offset after the last message of each partition.

        Negative for a partition that was never read, which is enough for an empty one.
        """
        while self._marks:
            now_ms, ends = self._marks[0]
            if any(max(0, offsets.get(where, 0)) < end for where, end in ends.items()):
                return
            self._marks.popleft()
            self.until_ms = max(self.until_ms, now_ms - HELD_MAX_MS)

    def forget(self) -> None:
        """Drop the marks: the offsets were those of another cluster."""
        self._marks.clear()
