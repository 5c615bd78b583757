"""Up to when everything that gateways sent is in ClickHouse; pure.

Now and then a caller notes how far each partition of the topic reaches. As soon as all of that is
written, whatever was at the broker by then is in ClickHouse, and with it all events of requests
that had ended a little earlier.
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
        until_ms: Events that gateways emitted before this Unix time are written; 0: not known. Goes
            up only.
    """

    def __init__(self) -> None:
        self.until_ms = 0
        self._marks: deque[tuple[int, Mapping[int, int]]] = deque()

    def mark(self, now_ms: int, ends: Mapping[int, int]) -> None:
        """Note where each partition ended at a time or later: the offset after the last message.

        Further marks are left out while hundreds wait: what is known then advances in larger steps.
        """
        if len(self._marks) < _MARKS_MAX:
            self._marks.append((now_ms, dict(ends)))

    def written(self, offsets: Mapping[int, int]) -> None:
        """Take note of what is written: the offset after the last message of each partition.

        Negative where nothing was ever read, which is all that an empty partition needs.
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
